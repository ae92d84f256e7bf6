"""Optimizer steps on episodes with several rows do not depend on the layout of ranks and micro-batches."""

import json
from pathlib import Path

import pytest
import torch

from tests.functional.rank import path_of
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

STEP = [
    "algorithm.num_prompts_per_step=4",
    "algorithm.num_generations_per_prompt=2",
    "policy.train_global_batch_size=4",
    "algorithm.loss_fn.reference_policy_kl_penalty=0.1",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    # A step of Adam would make rounding errors of gradients near 0 as large as other gradients.
    *("policy.megatron_cfg.optimizer.optimizer=sgd", "policy.megatron_cfg.optimizer.use_distributed_optimizer=false"),
    "policy.megatron_cfg.optimizer.lr=0.05",
]
PACKED = [
    *("policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=64"),
    *("policy.sequence_packing.logprob_mb_tokens=64", "policy.sequence_length_round=8"),
]
LAYOUTS = {
    "fixed": ["policy.train_micro_batch_size=2", "policy.logprob_batch_size=4"],
    "dynamic": ["policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=64"],
    "packed": PACKED,
    "graphs": PACKED,
}
TWO = ["cluster.cpu_ranks=2"]
PIPELINE = ["policy.megatron_cfg.pipeline_model_parallel_size=2"]


@pytest.fixture(scope="module")
def found(model_folder, tmp_path_factory):
    folder, script = tmp_path_factory.mktemp("episodes"), Path(__file__).with_name("episodes_rank.py")
    one = {"one": STEP + LAYOUTS["fixed"], "one graphs": STEP + PACKED}
    two = {f"two {name}": STEP + TWO + own for name, own in LAYOUTS.items()}
    two["two pipeline"] = STEP + TWO + PIPELINE + LAYOUTS["fixed"]
    two["two pipeline packed"] = STEP + TWO + PIPELINE + PACKED
    for ranks, cases in ((1, one), (2, two)):
        run_ranks(script, [str(model_folder), str(folder), json.dumps(cases)], ranks)
    return {name: torch.load(path_of(folder, name), weights_only=False) for name in one | two}


@pytest.mark.parametrize("case", ["one graphs", *(f"two {name}" for name in (*LAYOUTS, "pipeline", "pipeline packed"))])
def test_metrics_and_weights_are_those_of_one_rank(found, case):
    own, expected = found[case], found["one"]
    assert len(own["metrics"]) == 3 and all(one["grad_norm"] > 1e-3 for one in expected["metrics"])
    for metrics, wanted in zip(own["metrics"], expected["metrics"], strict=True):
        assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for name, values in own["after"].items():
        assert not torch.equal(values, own["before"][name]), name
        if name in expected["after"]:
            torch.testing.assert_close(values, expected["after"][name], rtol=1e-4, atol=1e-5, msg=name)


def test_replicas_have_all_rows_and_none_without_a_loss(found):
    for (first, second), (whole,) in zip(found["two fixed"]["lengths"], found["one"]["lengths"], strict=True):
        assert sorted(zip(*first, strict=True)) != sorted(zip(*second, strict=True))
        assert sorted([*zip(*first, strict=True), *zip(*second, strict=True)]) == sorted(zip(*whole, strict=True))
        assert 0 not in whole[1]
