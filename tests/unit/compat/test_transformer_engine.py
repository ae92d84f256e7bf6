"""The order of tokens where ranks exchange heads, and attention without dropout."""

from itertools import accumulate

import pytest
import torch

from nemo_rl_lite.compat import transformer_engine
from nemo_rl_lite.policy.context import own_places

NAMES = ("reorder_seq_chunks_after_a2a_before_attn_thd", "reorder_seq_chunks_before_a2a_after_attn_thd")


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("ranks", "lengths"), [(2, [8]), (2, [8, 4, 20]), (2, [4, 0, 12]), (3, [6, 18]), (4, [16, 8, 8, 40])]
)
def test_both_orders_are_those_in_which_ranks_have_tokens(ranks, lengths):
    at, tokens = boundaries(lengths), sum(lengths)
    whole = torch.randn(tokens, 2, 3, generator=torch.Generator().manual_seed(0))
    of_ranks = torch.cat([whole[own_places(lengths, rank, ranks)] for rank in range(ranks)])
    chunks = torch.arange(2 * ranks)
    found = transformer_engine.reorder_seq_chunks_after_a2a_before_attn_thd(of_ranks, at, chunks, ranks)
    assert found.equal(whole)
    assert transformer_engine.reorder_seq_chunks_before_a2a_after_attn_thd(whole, at, ranks).equal(of_ranks)


def test_it_is_the_example_of_transformer_engine():
    """The values in the docstring of its `reorder_seq_chunks_before_a2a_after_attn_thd`."""
    whole = torch.tensor([*range(8), *range(8), *range(8), *range(16)])
    ranked = [
        *(0, 7, 0, 7, 0, 7, 0, 1, 14, 15),
        *(1, 6, 1, 6, 1, 6, 2, 3, 12, 13),
        *(2, 5, 2, 5, 2, 5, 4, 5, 10, 11),
        *(3, 4, 3, 4, 3, 4, 6, 7, 8, 9),
    ]
    at = boundaries([8, 8, 8, 16])
    assert transformer_engine.reorder_seq_chunks_before_a2a_after_attn_thd(whole, at, 4).tolist() == ranked


def test_an_order_is_computed_once_for_a_row_and_anew_for_equal_boundaries_elsewhere():
    """The memory of boundaries may be used again for others."""
    transformer_engine.places_of_ranks.cache_clear()
    at, whole = boundaries([8]), torch.arange(8)
    orders = [transformer_engine.places_of_ranks(at, 2, 8) for _ in range(3)]
    assert orders[0] is orders[1] is orders[2]
    assert transformer_engine.places_of_ranks(boundaries([8]), 2, 8) is not orders[0]
    assert whole[orders[0]].tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
