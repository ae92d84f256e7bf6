"""The order of tokens where ranks exchange heads, and attention without dropout."""

import os
import sys
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_rl_lite.compat import transformer_engine
from nemo_rl_lite.policy.context import own_places

CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"
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


@pytest.fixture
def grouped_linear(monkeypatch) -> ModuleType:
    """A module of Transformer Engine whose GEMM returns what it got, and the value of the environment variable."""
    module: Any = ModuleType("transformer_engine.pytorch.module.grouped_linear")
    module.general_grouped_gemm = lambda *given, **options: (given, options, os.environ[CUTLASS])
    parent = ModuleType("transformer_engine.pytorch.module")
    parent.grouped_linear = module  # pyrefly: ignore
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module", parent)
    monkeypatch.setattr(transformer_engine, "fits", lambda name, release: True)
    monkeypatch.setitem(os.environ, CUTLASS, "1")
    return module


def test_experts_without_tokens_are_multiplied_by_cublas(grouped_linear):
    transformer_engine.multiply_experts_at_once()
    multiply: Any = grouped_linear.general_grouped_gemm
    assert multiply("a", "b", m_splits=[0, 3], grad=True) == (("a", "b"), {"m_splits": [0, 3], "grad": True}, "1")
    assert multiply("a", m_splits=[0, 0])[2] == "0"
    assert os.environ[CUTLASS] == "1"


def test_the_environment_may_choose_cublas(grouped_linear, monkeypatch):
    monkeypatch.setitem(os.environ, CUTLASS, "0")
    before: Any = grouped_linear.general_grouped_gemm
    transformer_engine.multiply_experts_at_once()
    assert grouped_linear.general_grouped_gemm is before
