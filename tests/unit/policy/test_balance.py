"""Shares of a batch that are equal in number and nearly equal in work."""

import random

import pytest

from nemo_rl_lite.policy.balance import even_shares


def test_every_item_has_one_replica_and_every_replica_as_many_items():
    source = random.Random(1)
    costs = [source.lognormvariate(0, 1) for _ in range(96)]
    shares = even_shares(costs, 8)
    assert [len(share) for share in shares] == [12] * 8
    assert sorted(index for share in shares for index in share) == list(range(96))
    assert all(share == sorted(share) for share in shares)


def test_the_sums_are_nearly_equal_where_neighbours_are_alike():
    source = random.Random(2)
    prompts = [source.lognormvariate(0, 1) for _ in range(64)]
    costs = [mean * source.lognormvariate(0, 0.3) for mean in prompts for _ in range(8)]

    def idle(shares: list[list[int]]) -> float:
        sums = [sum(costs[index] for index in share) for share in shares]
        return 1 - sum(sums) / len(sums) / max(sums)

    neighbours = [list(range(start, start + 64)) for start in range(0, 512, 64)]
    assert idle(neighbours) > 0.15
    assert idle(even_shares(costs, 8)) < 0.005


def test_one_replica_has_everything_in_order():
    assert even_shares([3.0, 1.0, 2.0], 1) == [[0, 1, 2]]


def test_a_count_that_cannot_be_shared_is_an_error():
    with pytest.raises(ValueError, match="3 items cannot be shared evenly by 2"):
        even_shares([1.0, 1.0, 1.0], 2)
