"""What passes leave behind, and what the log says of the segments that it keeps."""

import gc
import weakref
from functools import lru_cache
from types import SimpleNamespace

import torch

from nemo_rl_lite.compat.transformer_engine import places_of_ranks, places_of_sequences
from nemo_rl_lite.policy.memory import GIB, MIB, clear_module_caches, describe_fragmentation


class Rotary(torch.nn.Module):
    """Keeps its results, as megatron-core's does."""

    @lru_cache(maxsize=32)  # noqa: B019
    def forward(self, longest: int) -> torch.Tensor:
        return torch.zeros(longest)


class Stage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.linear, self.given = Rotary(), torch.nn.Linear(2, 2), [torch.zeros(3)]

    def set_input_tensor(self, given: list) -> None:
        self.given = given


def test_results_and_inputs_of_passes_are_let_go():
    stage = Stage()
    held = [weakref.ref(one) for one in (stage.rotary(5), stage.rotary(7), stage.given[0])]
    gc.collect()
    assert all(one() is not None for one in held)
    orders = places_of_ranks, places_of_sequences
    for order in orders:
        order(torch.tensor([0, 8]), 2, 8)
    clear_module_caches(SimpleNamespace(bare_chunks=[stage]))
    assert [one() for one in held] == [None] * 3
    assert [order.cache_info().currsize for order in orders] == [0, 0]


def segment(total: int, used: int) -> dict[str, int]:
    return {"total_size": total, "allocated_size": used}


def test_large_segments_with_little_in_use_are_named():
    found = describe_fragmentation([segment(8 * GIB, 2 * MIB), segment(2 * GIB, 3 * MIB), segment(4 * GIB, 3 * GIB)])
    assert "10.00 GiB that engines could use, because 5.0 MiB in 2 segments" in found
    assert "the largest has 8.00 GiB, of which 2.0 MiB" in found
    assert describe_fragmentation([segment(4 * GIB, 3 * GIB), segment(20 * MIB, 1 * MIB)]) is None
    assert describe_fragmentation([]) is None
