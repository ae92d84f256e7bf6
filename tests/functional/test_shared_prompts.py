"""Packs that compute a prompt once give what packs with a prompt in each row give."""

import json
from pathlib import Path

import pytest
import torch

from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

SCRIPT = Path(__file__).with_name("shared_prompts_rank.py")

COMMON = [
    "algorithm.num_prompts_per_step=4",
    "algorithm.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "policy.sequence_packing.enabled=true",
    "policy.sequence_packing.train_mb_tokens=64",
    "policy.sequence_length_round=4",
    "algorithm.loss_fn.reference_policy_kl_penalty=0.1",
    "policy.megatron_cfg.optimizer.use_distributed_optimizer=false",
]
PLAIN, SHARED = (f"policy.sequence_packing.shared_prompts={value}" for value in ("false", "true"))
TENSOR, PIPELINE = (f"policy.megatron_cfg.{name}_model_parallel_size=2" for name in ("tensor", "pipeline"))
TWO, RECOMPUTED = "cluster.cpu_ranks=2", "policy.megatron_cfg.activation_checkpointing=true"
ADAPTERS = [f"policy.megatron_cfg.peft.{own}" for own in ("enabled=true", "dim=4", "alpha=8")]
LAYOUTS = {
    1: {
        "plain": [PLAIN],
        "shared": [SHARED],
        "recomputed": [SHARED, RECOMPUTED],
        "adapters": [SHARED, *ADAPTERS],
    },
    2: {
        "tensor plain": [TWO, TENSOR, PLAIN],
        "tensor shared": [TWO, TENSOR, SHARED],
        "pipeline plain": [TWO, PIPELINE, PLAIN],
        "pipeline shared": [TWO, PIPELINE, SHARED],
        "pipeline recomputed": [TWO, PIPELINE, SHARED, RECOMPUTED],
    },
}
AT_ONCE = {
    1: {"at once": [SHARED], "recomputed at once": [SHARED, RECOMPUTED], "adapters at once": [SHARED, *ADAPTERS]},
    2: {"tensor at once": [TWO, TENSOR, SHARED], "pipeline at once": [TWO, PIPELINE, SHARED, RECOMPUTED]},
}
"""Attention layers make queries, keys and values in one kernel."""
PAIRS = [("shared", "plain"), ("recomputed", "plain"), ("tensor shared", "tensor plain")]
PAIRS += [("pipeline shared", "pipeline plain"), ("pipeline recomputed", "pipeline plain")]
PAIRS += [("at once", "plain"), ("recomputed at once", "plain"), ("adapters at once", "adapters")]
PAIRS += [("tensor at once", "tensor plain"), ("pipeline at once", "pipeline plain")]


@pytest.fixture(scope="module")
def outcomes(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared_prompts")
    for of_ranks, interprets in ((LAYOUTS, False), (AT_ONCE, True)):
        for ranks, layouts in of_ranks.items():
            cases = json.dumps({name: COMMON + own for name, own in layouts.items()})
            run_ranks(SCRIPT, [str(model_folder), str(folder), cases], ranks, interprets=interprets)
    return lambda layout: torch.load(folder / layout.replace(" ", "-"), weights_only=False)


@pytest.mark.parametrize(("shared", "plain"), PAIRS)
def test_logprobs_gradients_and_metrics_are_those_of_plain_packs(outcomes, shared, plain):
    ours, theirs = outcomes(shared), outcomes(plain)
    for own, expected in zip(ours["scores"], theirs["scores"], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)
    for own, expected in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert own == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for own, expected in zip(ours["gradients"], theirs["gradients"], strict=True):
        assert own.keys() == expected.keys()
        for name, values in expected.items():
            # An adapter begins with zeros after `linear_in`.
            assert values.norm() > 0 or name.endswith("linear_in.weight"), name
            assert (own[name] - values).norm() <= 1e-5 * values.norm(), name


@pytest.mark.parametrize("layout", [name for each in LAYOUTS.values() for name in each])
def test_before_the_first_step_the_ratio_is_exactly_one(outcomes, layout):
    previous, reference = outcomes(layout)["scores"]
    assert torch.equal(previous, reference)
    for metrics in filter(None, outcomes(layout)["metrics"]):
        assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1


def test_prompts_are_computed_once_per_pack(outcomes):
    shared, plain = outcomes("shared")["tokens"], outcomes("plain")["tokens"]
    assert max(shared) <= 64
    assert sum(shared) < 0.65 * sum(plain)


def test_training_tells_how_much_work_it_saved(outcomes):
    """A linear cost would be the share of tokens; attention's cost grows faster."""
    tokens = 1 - sum(outcomes("shared")["tokens"]) / sum(outcomes("plain")["tokens"])
    assert outcomes("plain")["saved"] == 0
    assert outcomes("shared")["saved"] / outcomes("shared")["work"] == pytest.approx(tokens, abs=0.05)
