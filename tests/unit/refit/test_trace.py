"""Segments that are traced from numbers, their windows, and the exchanges of buckets."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from nemo_rl_lite.refit import trace
from nemo_rl_lite.refit.group import connected
from nemo_rl_lite.refit.layout import Bucket, Slot
from nemo_rl_lite.refit.trace import (
    IndexTracer,
    Segment,
    StridedView,
    plan_exchange,
    segments_of_window,
    trace_strided_copies,
)

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
    monkeypatch.setattr(trace, "_CHUNK", chunk)
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
    monkeypatch.setattr(trace, "_MOST_SEGMENTS", 2)
    numbering = IndexTracer(ranks=1, largest=6)
    assert trace_strided_copies(convert(numbering.number(0, 0, torch.zeros(6))), numbering) is None


def test_values_that_are_shifted_leave_the_parameter():
    """A conversion that adds one, as those of zero-centred norms do."""
    numbering = IndexTracer(ranks=2, largest=6)
    for elements in (4, 6):
        (segment,) = trace_strided_copies(numbering.number(1, 3, torch.zeros(elements)) + 1, numbering)
        assert segment.source.last == elements


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
    monkeypatch.setattr(trace, "_MOST_GRAINS", 1)
    assert segments_of(segments, whole, whole[1:]) is None
    assert segments_of(segments, whole, whole) is not None


SLOTS = tuple(Slot(name, (256,), "float32", index * 1024, 1024) for index, name in enumerate("abcd"))
BUCKET = Bucket(SLOTS, 4096)


def segment(rank: int, parameter: int, begin: int = 0, size: int = 256) -> Segment:
    return Segment(rank, parameter, StridedView(0, (size,), (1,)), StridedView(begin, (size,), (1,)))


def whole(*ranks: int) -> dict[str, list[Segment]]:
    """The tensors, one after the other, are of these ranks."""
    return {slot.name: [segment(rank, part)] for part, (slot, rank) in enumerate(zip(SLOTS, ranks, strict=True))}


SPLIT = {slot.name: [segment(0, part, 0, 128), segment(1, part, 128, 128)] for part, slot in enumerate(SLOTS)}


def test_halves_are_gathered_at_once():
    for rank in (0, 1):
        exchange = plan_exchange(BUCKET, {0: SPLIT, 1: SPLIT}, [0, 1], rank, gather=True)
        assert exchange.gathered and exchange.collectives == 1 and exchange.whole is None
        assert exchange.sections == {0: (0, 2048), 1: (2048, 2048)} and exchange.nbytes == 4096
        assert [(packed.parameter, at) for packed, at in exchange.own] == [
            (part, 2048 * rank + 512 * part) for part in range(4)
        ]
        assert {one.rank for _, one in exchange.here} == {rank}
        assert [at for _, _, at in exchange.arriving] == [2048 * (1 - rank) + 512 * part for part in range(4)]


def test_halves_are_broadcast_where_gathering_is_slow():
    exchange = plan_exchange(BUCKET, {0: SPLIT, 1: SPLIT}, [0, 1], 0, gather=False)
    assert not exchange.gathered and exchange.collectives == 2 and exchange.sections == {0: (0, 2048), 1: (2048, 2048)}


def test_what_one_rank_wants_is_sent_by_the_others_only():
    exchange = plan_exchange(BUCKET, {0: SPLIT}, [0, 1], 0, gather=True)
    assert not exchange.gathered and exchange.sections == {1: (0, 2048)}
    assert not exchange.own and len(exchange.arriving) == 4
    other = plan_exchange(BUCKET, {0: SPLIT}, [0, 1], 1, gather=True)
    assert other.sections == exchange.sections and len(other.own) == 4 and not other.here and not other.arriving


@pytest.mark.parametrize("receivers", [(0,), (0, 1, 2), (0, 2)])
def test_a_bucket_of_one_rank_goes_as_it_is(receivers):
    recipes = {receiver: whole(1, 1, 1, 1) for receiver in receivers}
    for rank in (0, 1, 2):
        exchange = plan_exchange(BUCKET, recipes, [0, 1, 2], rank, gather=True)
        assert exchange.whole == 1 and exchange.collectives == 1 and not exchange.nbytes
        assert len(exchange.here) == (4 if rank == 1 else 0) and not exchange.own and not exchange.arriving


def test_sections_of_unequal_size_are_broadcast():
    exchange = plan_exchange(BUCKET, {0: whole(0, 0, 0, 1), 1: whole(0, 0, 0, 1)}, [0, 1], 1, gather=True)
    assert not exchange.gathered and exchange.sections == {0: (0, 3072), 1: (3072, 1024)} and exchange.collectives == 2


def test_what_a_rank_has_itself_is_not_moved():
    replicas = {rank: whole(rank, rank, rank, rank) for rank in (0, 1)}
    exchange = plan_exchange(BUCKET, replicas, [0, 1], 1, gather=True)
    assert exchange.collectives == 0 and len(exchange.here) == 4 and not exchange.sections
    # With one more tensor that is another's.
    exchange = plan_exchange(BUCKET, {0: whole(0, 0, 0, 1), 1: whole(1, 1, 1, 1)}, [0, 1], 1, gather=True)
    assert exchange.sections == {1: (0, 1024)} and len(exchange.here) == 4 and not exchange.arriving


def test_a_window_of_two_tensors_is_packed_once():
    """Tied embeddings have two names."""
    tied = {"a": [segment(1, 0)], "b": [segment(1, 0)], "c": [segment(0, 1)], "d": [segment(1, 2)]}
    exchange = plan_exchange(BUCKET, {0: tied}, [0, 1], 0, gather=True)
    assert exchange.sections == {1: (0, 2048)}
    assert [at for _, _, at in exchange.arriving] == [0, 0, 1024]


def test_ranks_that_need_each_other_are_connected():
    # Two tensor-parallel pairs, whose experts are spread over all four; then without experts.
    assert connected({0: {0, 1, 2, 3}, 3: {2, 3, 1, 0}}) == [[0, 1, 2, 3]]
    assert connected({0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {3, 2}}) == [[0, 1], [2, 3]]
    assert connected({0: {0}, 1: {1}}) == [[0], [1]]
    assert connected({0: {1}, 2: {3}, 4: {1, 3}}) == [[0, 1, 2, 3, 4]]
