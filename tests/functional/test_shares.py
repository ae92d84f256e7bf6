"""An optimizer step does not depend on which data-parallel replica trains on which rows."""

import json
from pathlib import Path

import pytest
import torch

from tests.functional.conftest import random_experts
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

STEP = [
    "cluster.cpu_ranks=2",
    "algorithm.num_prompts_per_step=2",
    "policy.train_global_batch_size=16",
    "algorithm.loss_fn.reference_policy_kl_penalty=0.1",
    # Whole gradients are on each rank, and stay as they are.
    "policy.megatron_cfg.optimizer.use_distributed_optimizer=false",
    "policy.max_grad_norm=1000000",
]
# 64 tokens hold two to seven of the script's sequences.
LAYOUTS = {
    "fixed": ["policy.train_micro_batch_size=4", "policy.logprob_batch_size=4"],
    "dynamic": ["policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=64"],
    "packed": ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=64"],
}


EXPERTS = {"experts": [*LAYOUTS["packed"], "policy.megatron_cfg.expert_model_parallel_size=2"]}


@pytest.fixture(scope="module")
def steps(model_folder, tmp_path_factory):
    folder, script = tmp_path_factory.mktemp("shares"), Path(__file__).with_name("shares_rank.py")
    experts = random_experts(folder / "model", num_hidden_layers=2, num_experts=4)
    for model, layouts in ((model_folder, LAYOUTS), (experts, EXPERTS)):
        of_model = {name: STEP + own for name, own in layouts.items()}
        run_ranks(script, [str(model), str(folder), json.dumps(of_model)], 2)
    return lambda layout, way: torch.load(folder / f"{layout}-{way}", weights_only=False)


@pytest.mark.parametrize("way", ["balanced", "alone"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPERTS])
def test_loss_and_gradient_are_those_of_neighbouring_shares(steps, layout, way):
    """Ranks with experts fill up with micro-batches without a loss where one has a single row."""
    metrics, gradients, shares, _ = steps(layout, way)
    expected, expected_gradients, neighbours, _ = steps(layout, "neighbours")
    assert set(map(tuple, shares)) != set(map(tuple, neighbours)), "the two ways must differ"
    assert (len(shares[0]) == len(shares[1])) == (way == "balanced" and layout in ("fixed", "dynamic"))
    assert metrics.keys() == expected.keys() and abs(expected["loss"]) > 1e-3
    for name in metrics:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name
    assert gradients.keys() == expected_gradients.keys()
    assert expected["grad_norm"] > 0.1
    for name, gradient in expected_gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


def test_each_pass_is_measured(steps):
    passes = steps("packed", "balanced")[3]
    assert {phase: len(seconds) for phase, seconds in passes.items()} == {"logprob": 2, "train": 1}
    assert all(seconds > 0 for own in passes.values() for seconds in own)
