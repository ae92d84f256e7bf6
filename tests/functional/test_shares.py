"""An optimizer step does not depend on which data-parallel replica trains on which rows."""

import json
from pathlib import Path

import pytest
import torch

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


@pytest.fixture(scope="module")
def steps(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    layouts = {name: STEP + own for name, own in LAYOUTS.items()}
    run_ranks(Path(__file__).with_name("shares_rank.py"), [str(model_folder), str(folder), json.dumps(layouts)], 2)
    return lambda layout, way: torch.load(folder / f"{layout}-{way}", weights_only=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_are_those_of_neighbouring_shares(steps, layout):
    metrics, gradients, shares, _ = steps(layout, "balanced")
    expected, expected_gradients, neighbours, _ = steps(layout, "neighbours")
    assert set(map(tuple, shares)) != set(map(tuple, neighbours)), "the two ways must differ"
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
