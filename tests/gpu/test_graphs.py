"""CUDA graphs of training passes give what the same passes give one kernel at a time, with every loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "functional" / "graphs_rank.py"
OVERRIDES = [
    *("policy=megatron_gpu", "cluster.gpus_per_node=1", "generation=transformers"),
    *("policy.sequence_packing.train_mb_tokens=40", "policy.sequence_length_round=8"),
    *("policy.max_total_sequence_length=32", "policy.train_global_batch_size=12", "algorithm.num_prompts_per_step=6"),
    *("algorithm.num_generations_per_prompt=2", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"),
    # Small, so that rounding errors grow little in 41 steps.
    "policy.megatron_cfg.optimizer.lr=1.0e-4",
]


@pytest.fixture(scope="module")
def found(gpu_model, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What each way saved: as without graphs, the shapes of graphs, and graphs."""
    output, ways = tmp_path_factory.mktemp("graphs") / "found", ["plain", "again", "graphs"]
    run_ranks(SCRIPT, [str(gpu_model), str(output), json.dumps(OVERRIDES), json.dumps(ways)], 1, timeout_s=500)
    return torch.load(output, weights_only=False)


def test_every_loss_is_recorded_and_again_after_gradients_have_moved(found):
    *with_each, after_a_move = found["graphs"]["recorded"]
    assert all(before < after for before, after in zip([0, *with_each], with_each, strict=False))
    assert 0 < after_a_move < with_each[-1]


# Kernels for another number of rows round otherwise, and backward passes may add up in another order.
@pytest.mark.parametrize(("other", "loss", "norm"), [("again", 2e-3, 2e-2), ("plain", 2e-2, 0.1)])
def test_losses_and_gradients_are_the_same(other, loss, norm, found):
    ours, theirs = found["graphs"]["measured"], found[other]["measured"]
    assert len(ours) == len(theirs)
    for (name, step), (_, expected) in zip(ours, theirs, strict=True):
        assert set(step) == set(expected)
        assert expected["grad_norm"] > 1e-3
        assert step["loss"] == pytest.approx(expected["loss"], rel=loss, abs=loss), name
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm), name


def test_the_other_metrics_are_the_same(found):
    for (name, step), (_, expected) in zip(found["graphs"]["measured"], found["again"]["measured"], strict=True):
        shown = {key: value for key, value in step.items() if not key.endswith(("_min", "_max")) and key != "grad_norm"}
        assert shown == pytest.approx({key: expected[key] for key in shown}, rel=2e-2, abs=5e-3), name


def test_weights_are_the_same(found):
    moved = apart = 0.0
    for name, values in found["graphs"]["weights"].items():
        moved += (values - found["graphs"]["initial"][name]).float().abs().sum().item()
        apart += (values - found["again"]["weights"][name]).float().abs().sum().item()
    # Where a gradient is a rounding error, a step of Adam has its sign.
    assert moved > 0 and apart < 0.2 * moved
