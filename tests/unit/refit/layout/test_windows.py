"""The segments of a window of a tensor move what the window has."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nemo_rl_lite.refit import trace as windows_module
from nemo_rl_lite.refit.trace import IndexTracer, Segment, StridedView, segments_of_window, trace_strided_copies
from tests.unit.refit.layout.test_views import CONVERSIONS


def window_of(whole: Tensor, view: Tensor) -> StridedView:
    begin = view.storage_offset() - whole.storage_offset()
    return StridedView(begin, tuple(view.shape), view.stride())


def segments_of(segments: list[Segment], whole: Tensor, view: Tensor) -> list[Segment] | None:
    return segments_of_window(segments, whole.numel(), window_of(whole, view))


def shard(rank: int, size: int, to: int) -> Segment:
    return Segment(rank, 0, StridedView(0, (size,), (1,)), StridedView(to, (size,), (1,)))


def made_of(segments: list[Segment], shards: list[Tensor], shape: torch.Size) -> Tensor:
    made = torch.full(shape, 7.0)
    for one in segments:
        one.target.of(made).copy_(one.source.of(shards[one.rank]))
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
    numbering = IndexTracer(len(shards), max(shard.numel() for shard in shards))
    numbers = [numbering.number(rank, 3, shard) for rank, shard in enumerate(shards)]
    segments = trace_strided_copies(convert(numbers), numbering)
    whole = convert(shards).contiguous()
    for cut in cuts(whole):
        found = segments_of(segments, whole, cut)
        assert found is not None and all(one.parameter == 3 for one in found)
        assert torch.equal(made_of(found, shards, cut.shape), cut)


def test_a_large_projection_takes_few_copies():
    """Rows on four ranks; the second of two engine ranks wants half of the columns, and of the rows."""
    rows, columns, ranks = 512, 1024, 4
    own = rows // ranks * columns
    segments = [shard(rank, own, rank * own) for rank in range(ranks)]
    whole = torch.empty(rows, columns)
    by_columns = segments_of(segments, whole, whole[:, columns // 2 :])
    assert [one.source.sizes for one in by_columns] == [(rows // ranks, columns // 2)] * ranks
    by_rows = segments_of(segments, whole, whole[rows // 2 :])
    assert [(one.rank, one.source.sizes) for one in by_rows] == [(2, (own,)), (3, (own,))]
    # A vocabulary that is cut otherwise: one row of the second rank's.
    first = segments_of(segments, whole, whole[: rows // ranks + 1])
    assert [(one.rank, one.source.sizes) for one in first] == [(0, (own,)), (1, (columns,))]


def test_one_row_of_each_of_several_ranks():
    """Where a whole shard is a grain."""
    segments = [shard(rank, 8, rank * 8) for rank in range(3)]
    shards = [torch.randn(8) for _ in range(3)]
    whole = torch.cat(shards).view(3, 8)
    found = segments_of(segments, whole, whole[1:])
    assert torch.equal(made_of(found, shards, torch.Size((2, 8))), whole[1:])


def test_what_is_not_regular_has_no_segments(monkeypatch):
    segments = [shard(0, 6, 0)]
    whole = torch.empty(6)
    monkeypatch.setattr(windows_module, "_MOST_GRAINS", 1)
    assert segments_of(segments, whole, whole[1:]) is None
    assert segments_of(segments, whole, whole) is not None
