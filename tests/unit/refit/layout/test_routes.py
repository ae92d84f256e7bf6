"""What is packed, exchanged and copied for a bucket."""

import pytest

from nemo_rl_lite.refit.group import connected
from nemo_rl_lite.refit.layout import Bucket, Slot
from nemo_rl_lite.refit.trace import Segment, StridedView, make_route

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
        route = make_route(BUCKET, {0: SPLIT, 1: SPLIT}, [0, 1], rank, gather=True)
        assert route.gathered and route.collectives == 1 and route.whole is None
        assert route.sections == {0: (0, 2048), 1: (2048, 2048)} and route.nbytes == 4096
        assert [(packed.parameter, at) for packed, at in route.own] == [
            (part, 2048 * rank + 512 * part) for part in range(4)
        ]
        assert {one.rank for _, one in route.here} == {rank}
        assert [at for _, _, at in route.arriving] == [2048 * (1 - rank) + 512 * part for part in range(4)]


def test_halves_are_broadcast_where_gathering_is_slow():
    route = make_route(BUCKET, {0: SPLIT, 1: SPLIT}, [0, 1], 0, gather=False)
    assert not route.gathered and route.collectives == 2 and route.sections == {0: (0, 2048), 1: (2048, 2048)}


def test_what_one_rank_wants_is_sent_by_the_others_only():
    route = make_route(BUCKET, {0: SPLIT}, [0, 1], 0, gather=True)
    assert not route.gathered and route.sections == {1: (0, 2048)} and not route.own and len(route.arriving) == 4
    other = make_route(BUCKET, {0: SPLIT}, [0, 1], 1, gather=True)
    assert other.sections == route.sections and len(other.own) == 4 and not other.here and not other.arriving


@pytest.mark.parametrize("receivers", [(0,), (0, 1, 2), (0, 2)])
def test_a_bucket_of_one_rank_goes_as_it_is(receivers):
    recipes = {receiver: whole(1, 1, 1, 1) for receiver in receivers}
    for rank in (0, 1, 2):
        route = make_route(BUCKET, recipes, [0, 1, 2], rank, gather=True)
        assert route.whole == 1 and route.collectives == 1 and not route.nbytes
        assert len(route.here) == (4 if rank == 1 else 0) and not route.own and not route.arriving


def test_sections_of_unequal_size_are_broadcast():
    route = make_route(BUCKET, {0: whole(0, 0, 0, 1), 1: whole(0, 0, 0, 1)}, [0, 1], 1, gather=True)
    assert not route.gathered and route.sections == {0: (0, 3072), 1: (3072, 1024)} and route.collectives == 2


def test_what_a_rank_has_itself_is_not_moved():
    replicas = {rank: whole(rank, rank, rank, rank) for rank in (0, 1)}
    route = make_route(BUCKET, replicas, [0, 1], 1, gather=True)
    assert route.collectives == 0 and len(route.here) == 4 and not route.sections
    # With one more tensor that is another's.
    route = make_route(BUCKET, {0: whole(0, 0, 0, 1), 1: whole(1, 1, 1, 1)}, [0, 1], 1, gather=True)
    assert route.sections == {1: (0, 1024)} and len(route.here) == 4 and not route.arriving


def test_a_window_of_two_tensors_is_packed_once():
    """Tied embeddings have two names."""
    tied = {"a": [segment(1, 0)], "b": [segment(1, 0)], "c": [segment(0, 1)], "d": [segment(1, 2)]}
    route = make_route(BUCKET, {0: tied}, [0, 1], 0, gather=True)
    assert route.sections == {1: (0, 2048)}
    assert [at for _, _, at in route.arriving] == [0, 0, 1024]


def test_ranks_that_need_each_other_are_connected():
    # Two tensor-parallel pairs, whose experts are spread over all four; then without experts.
    assert connected({0: {0, 1, 2, 3}, 3: {2, 3, 1, 0}}) == [[0, 1, 2, 3]]
    assert connected({0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {3, 2}}) == [[0, 1], [2, 3]]
    assert connected({0: {0}, 1: {1}}) == [[0], [1]]
    assert connected({0: {1}, 2: {3}, 4: {1, 3}}) == [[0, 1, 2, 3, 4]]
