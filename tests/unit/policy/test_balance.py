"""Shares of a batch that are nearly equal in work."""

import random
from itertools import batched

import pytest

from nemo_rl_lite.policy.balance import even_work, split_longest, swapped
from nemo_rl_lite.policy.micro_batches import Layout, balanced_shares, work


@pytest.mark.parametrize("most", [None, 12])
def test_every_item_has_one_replica(most):
    source = random.Random(1)
    costs = [source.lognormvariate(0, 1) for _ in range(96)]
    shares = even_work(costs, 8, most)
    assert sorted(index for share in shares for index in share) == list(range(96))
    assert all(share == sorted(share) for share in shares)
    assert (len(set(map(len, shares))) == 1) == (most == 12)


def test_a_replica_with_a_long_item_has_fewer():
    assert even_work([8.0, 1.0, 4.0, 1.0, 2.0], 2) == [[0], [1, 2, 3, 4]]
    assert even_work([8.0, 1.0, 4.0, 1.0, 2.0, 0.0], 2, 3) == [[0, 3, 5], [1, 2, 4]]
    assert even_work([0.0, 0.0, 0.0], 3) == [[0], [1], [2]], "nobody without an item"


def test_the_sums_are_nearly_equal_where_neighbours_are_alike():
    source = random.Random(2)
    prompts = [source.lognormvariate(0, 1) for _ in range(64)]
    costs = [mean * source.lognormvariate(0, 0.3) for mean in prompts for _ in range(8)]

    def idle(shares: list[list[int]]) -> float:
        sums = [sum(costs[index] for index in share) for share in shares]
        return 1 - sum(sums) / len(sums) / max(sums)

    neighbours = [list(range(start, start + 64)) for start in range(0, 512, 64)]
    assert idle(neighbours) > 0.15
    assert idle(even_work(costs, 8)) < 0.005


def test_swaps_bring_together_work_that_depends_on_who_meets_whom():
    """Two long items of one share cost less than two of two shares, as padding does."""
    sizes = [8.0, 7.0, 7.0, 6.0, 2.0, 1.0]

    def padded(share):
        own = sorted((sizes[index] for index in share), reverse=True)
        return 2 * own[0] + own[2]

    before = [[0, 4, 5], [1, 2, 3]]
    after = swapped(before, sizes, padded)
    assert max(map(padded, after)) < max(map(padded, before))
    assert sorted(after[0] + after[1]) == list(range(6)) and [len(share) for share in after] == [3, 3]
    assert swapped([[0, 3], [1, 2]], sizes, lambda share: 1.0) == [[0, 3], [1, 2]], "equal work stays as it is"


def lengths_of_prompts(seed: int, prompts: int = 64) -> list[int]:
    source = random.Random(seed)
    means = [source.lognormvariate(6, 1) for _ in range(prompts)]
    return [8 + min(8192, int(mean * source.lognormvariate(0, 0.3))) for mean in means for _ in range(8)]


@pytest.mark.parametrize("together", [1, 2])
def test_padded_micro_batches_of_all_replicas_are_nearly_equal_work(together):
    layout, idle = Layout("dynamic", 16384, 64, together), {}
    for name, own_layout in {"sums": None, "padded": layout}.items():
        idle[name] = []
        for seed in range(6):
            lengths = lengths_of_prompts(seed)
            shares = balanced_shares(lengths, 8, float, together, own_layout)
            assert sorted(row for share in shares for row in share) == list(range(512))
            # Neighbours that a loss compares are in one share.
            assert all(row % together == place % together for share in shares for place, row in enumerate(share))
            groups = [list(batched((row // together for row in share), together)) for share in shares]
            assert all(len(set(group)) == 1 for share in groups for group in share)
            owned = [[lengths[row] for row in share] for share in shares]
            works = [work(own, layout, float) for own in owned]
            idle[name].append(1 - sum(works) / len(works) / max(works))
    assert sum(idle["padded"]) / 6 < 0.02 < 0.025 < sum(idle["sums"]) / 6


def test_the_work_of_a_padded_share_counts_its_padding():
    assert work([5, 3, 3, 1], Layout("dynamic", 10, 1), float) == 2 * 5 + 2 * 3
    assert work([5, 3, 3, 1], Layout("dynamic", 16, 4), float) == 2 * 8 + 2 * 4
    assert work([5, 3, 3, 1], Layout("packed", 10, 1), float) == 12


@pytest.mark.parametrize(
    ("costs", "ranks", "too_long", "shared", "of_ranks"),
    [
        # One item, or one for which the other rank would wait, is shared.
        ([5.0], 2, [], [0], [[], []]),
        ([9.0, 1.0, 1.0, 1.0], 2, [], [0, 1], [[2], [3]]),
        # A long item is whole if others fill the other rank meanwhile.
        ([9.0, 4.0, 5.0], 2, [], [], [[0], [1, 2]]),
        ([9.0, 4.0, 4.5, 0.5], 2, [0], [0], [[2], [1, 3]]),
        # Sharing gains less than it costs.
        ([1.0] * 11, 12, [], [], [[place] for place in range(11)] + [[]]),
        ([3.0, 2.0], 2, [0, 1], [0, 1], [[], []]),
    ],
)
def test_ranks_share_the_longest_items_if_this_is_faster(costs, ranks, too_long, shared, of_ranks):
    found = split_longest(costs, ranks, [place in too_long for place in range(len(costs))])
    assert found == (shared, of_ranks)
