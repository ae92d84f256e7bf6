"""Segments found from numbers move the same elements as the conversion that the numbers went through."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nemo_rl_lite.refit import trace as views_module
from nemo_rl_lite.refit.trace import IndexTracer, trace_strided_copies

GROUPS, QUERIES, DIM, HIDDEN = 4, 2, 3, 5
FUSED = (GROUPS * (QUERIES + 2) * DIM, HIDDEN)

Conversion = Callable[[list[Tensor]], Tensor]


def part_of_fused(begin: int, end: int) -> Conversion:
    """Queries (or keys, or values) of every group, whose groups are spread over the shards."""

    def convert(shards: list[Tensor]) -> Tensor:
        whole = torch.cat(shards)
        groups = whole.view(-1, QUERIES + 2, DIM, *whole.shape[1:])
        return groups[:, begin:end].reshape(-1, *whole.shape[1:])

    return convert


def gate(shards: list[Tensor]) -> Tensor:
    return torch.cat([shard.chunk(2)[0] for shard in shards])


CONVERSIONS: dict[str, tuple[list[tuple[int, ...]], Conversion, int]] = {
    "as it is": ([(6, 5)], lambda shards: shards[0], 1),
    "columns of a layer": ([(6, 5)] * 3, torch.cat, 3),
    "rows of a layer": ([(6, 5)] * 2, lambda shards: torch.cat(shards, dim=1), 2),
    "queries, spread": ([(FUSED[0] // 2, HIDDEN)] * 2, part_of_fused(0, QUERIES), 2),
    "keys, whole": ([FUSED], part_of_fused(QUERIES, QUERIES + 1), 1),
    "biases of values, spread": ([(FUSED[0] // 2,)] * 2, part_of_fused(QUERIES + 1, QUERIES + 2), 2),
    "gates": ([(8, 5)] * 2, gate, 2),
    "a padded vocabulary, cut": ([(7, 3)] * 2, lambda shards: torch.cat(shards)[:11], 2),
    "cut within a row": ([(7, 3)], lambda shards: shards[0].flatten()[4:17], 1),
    "rows of a layer, cut": ([(6, 4)] * 2, lambda shards: torch.cat(shards, dim=1)[:5], 2),
    "stacked experts": ([(4, 3)] * 4, torch.stack, 4),
    "stacked and transposed experts": ([(4, 3)] * 2, lambda shards: torch.stack(shards).transpose(1, 2), 2),
    "three dimensions turned": ([(2, 3, 4)], lambda shards: shards[0].permute(2, 0, 1), 1),
    "one of several replicas": ([(5,)] * 3, lambda shards: shards[1], 1),
    "fewer heads than ranks": ([(6, 2)] * 4, lambda shards: torch.cat(shards[::2]), 2),
    "one element": ([(1,)], lambda shards: shards[0], 1),
    "a number": ([()], lambda shards: shards[0], 1),
    "nothing": ([(4, 0)], lambda shards: shards[0], 0),
    "blocks of unequal size": (
        [(20,)],
        lambda shards: torch.cat([shards[0][:5], shards[0][8:10], shards[0][12:14]]),
        2,
    ),
    "blocks in the other order": (
        [(6, 2)],
        lambda shards: torch.cat([shards[0][4:], shards[0][2:4], shards[0][:2]]),
        3,
    ),
}


@pytest.mark.parametrize("case", CONVERSIONS)
@pytest.mark.parametrize("chunk", [3, 1 << 24])
def test_segments_give_what_the_conversion_gives(case, chunk, monkeypatch):
    monkeypatch.setattr(views_module, "_CHUNK", chunk)
    shapes, convert, count = CONVERSIONS[case]
    # The shards lie in the middle of a buffer, as megatron-core's parameters do.
    shards = [torch.randn(1000)[7 : 7 + torch.Size(shape).numel()].view(shape) for shape in shapes]
    numbering = IndexTracer(ranks=len(shards) + 1, largest=max(shard.numel() for shard in shards))
    found = trace_strided_copies(
        convert([numbering.number(rank, 5 - rank, shard) for rank, shard in enumerate(shards)]), numbering
    )
    assert found is not None and len(found) == count
    expected = convert(shards).contiguous()
    made = torch.full_like(expected, 7.0)
    for one in found:
        assert one.parameter == 5 - one.rank
        assert one.source.last < shards[one.rank].numel()
        one.target.of(made).copy_(one.source.of(shards[one.rank]))
    assert torch.equal(made, expected)


@pytest.mark.parametrize(
    "convert",
    [
        lambda numbers: numbers.flip(0),
        lambda numbers: numbers * 3,
        lambda numbers: numbers - 100,
        lambda numbers: numbers.double(),
        lambda numbers: numbers.to(torch.int32),
        lambda numbers: numbers[torch.tensor([0, 3, 1, 5, 4, 2])],
    ],
    ids=["backwards", "scaled", "below", "floats", "cast", "irregular"],
)
def test_what_no_view_gives_has_no_segments(convert, monkeypatch):
    monkeypatch.setattr(views_module, "_MOST_SEGMENTS", 2)
    numbering = IndexTracer(ranks=1, largest=6)
    assert trace_strided_copies(convert(numbering.number(0, 0, torch.zeros(6))), numbering) is None


def test_values_that_are_shifted_leave_the_parameter():
    """A conversion that adds one, as those of zero-centred norms do."""
    numbering = IndexTracer(ranks=2, largest=6)
    for elements in (4, 6):
        (segment,) = trace_strided_copies(numbering.number(1, 3, torch.zeros(elements)) + 1, numbering)
        assert segment.source.last == elements
