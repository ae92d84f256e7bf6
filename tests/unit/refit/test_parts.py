"""The boxes of a part of a tensor move what the part has."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nemo_rl_lite.refit import parts as parts_module
from nemo_rl_lite.refit.boxes import Box, Piece, Places, find_boxes
from nemo_rl_lite.refit.parts import Part, boxes_of_part
from tests.unit.refit.test_boxes import CONVERSIONS


def part_of(whole: Tensor, view: Tensor) -> Part:
    begin = view.storage_offset() - whole.storage_offset()
    return Part(whole.numel(), begin, tuple(view.shape), view.stride())


def made_of(boxes: list[Box], shards: list[Tensor], shape: torch.Size) -> Tensor:
    made = torch.full(shape, 7.0)
    for box in boxes:
        box.of(made).copy_(box.piece.of(shards[box.piece.rank]))
    return made


def cuts(whole: Tensor) -> Iterator[Tensor]:
    """What tensor-parallel loaders take, along every axis and at every place, some of them turned."""
    yield whole
    for axis, size in enumerate(whole.shape):
        for begin, end in itertools.combinations(range(size + 1), 2):
            cut = whole.narrow(axis, begin, end - begin)
            yield cut
            if whole.dim() > 1:
                yield cut.transpose(0, 1)
                yield cut.transpose(-1, -2).unsqueeze(1)


@pytest.mark.parametrize("case", [case for case in CONVERSIONS if case != "nothing"])
def test_every_cut_of_every_conversion(case):
    shapes, convert, _ = CONVERSIONS[case]
    shards = [torch.randn(shape) for shape in shapes]
    places = Places(len(shards), max(shard.numel() for shard in shards))
    boxes = find_boxes(convert([places.number(rank, 3, shard) for rank, shard in enumerate(shards)]), places)
    whole = convert(shards).contiguous()
    for cut in cuts(whole):
        found = boxes_of_part(boxes, part_of(whole, cut))
        assert found is not None and all(box.piece.part == 3 for box in found)
        assert torch.equal(made_of(found, shards, cut.shape), cut)


def test_a_large_projection_takes_few_copies():
    """Rows on four ranks; the second of two engine ranks wants half of the columns, and of the rows."""
    rows, columns, ranks = 512, 1024, 4
    own = rows // ranks * columns
    boxes = [Box(Piece(rank, 0, 0, (own,), (1,)), rank * own, (1,)) for rank in range(ranks)]
    whole = torch.empty(rows, columns)
    by_columns = boxes_of_part(boxes, part_of(whole, whole[:, columns // 2 :]))
    assert [box.piece.sizes for box in by_columns] == [(rows // ranks, columns // 2)] * ranks
    by_rows = boxes_of_part(boxes, part_of(whole, whole[rows // 2 :]))
    assert [(box.piece.rank, box.piece.sizes) for box in by_rows] == [(2, (own,)), (3, (own,))]
    # A vocabulary that is cut otherwise: one row of the second rank's.
    first = boxes_of_part(boxes, part_of(whole, whole[: rows // ranks + 1]))
    assert [(box.piece.rank, box.piece.sizes) for box in first] == [(0, (own,)), (1, (columns,))]


def test_one_row_of_each_of_several_ranks():
    """Where a whole shard is a grain."""
    boxes = [Box(Piece(rank, 0, 0, (8,), (1,)), rank * 8, (1,)) for rank in range(3)]
    shards = [torch.randn(8) for _ in range(3)]
    whole = torch.cat(shards).view(3, 8)
    found = boxes_of_part(boxes, part_of(whole, whole[1:]))
    assert torch.equal(made_of(found, shards, torch.Size((2, 8))), whole[1:])


def test_what_is_not_regular_has_no_boxes(monkeypatch):
    boxes = [Box(Piece(0, 0, 0, (6,), (1,)), 0, (1,))]
    whole = torch.empty(6)
    monkeypatch.setattr(parts_module, "_MOST_GRAINS", 1)
    assert boxes_of_part(boxes, part_of(whole, whole[1:])) is None
    assert boxes_of_part(boxes, part_of(whole, whole)) is not None
