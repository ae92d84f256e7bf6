"""How often a training step makes the host wait for the device, which then runs out of work."""

import json
from pathlib import Path

import pytest

from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

BATCH = [
    *("algorithm.num_prompts_per_step=2", "policy.train_global_batch_size=16", "policy.logprob_batch_size=4"),
    *("algorithm.loss_fn.reference_policy_kl_penalty=0.0", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"),
]
PACKED = ["policy.sequence_packing.enabled=true", "policy.sequence_length_round=8"]
CASES = {
    "one micro-batch": ["policy.train_micro_batch_size=16"],
    "eight micro-batches": ["policy.train_micro_batch_size=2"],
    "one pack": [*PACKED, "policy.sequence_packing.train_mb_tokens=400"],
    "several packs": [*PACKED, "policy.sequence_packing.train_mb_tokens=40"],
    "more metrics": [
        "policy.train_micro_batch_size=2",
        "algorithm.loss_fn.use_importance_sampling_correction=true",
        "algorithm.loss_fn.token_veto_ratio=0.01",
    ],
}
# Lengths and, for packs, tokens of the rows, which are on the host anyway; the norm of gradients; all metrics at once.
MOST = 4


def test_a_training_step_reads_tensors_a_fixed_number_of_times(model_folder):
    script = Path(__file__).with_name("sync_rank.py")
    cases = {name: BATCH + own for name, own in CASES.items()}
    (output,) = run_ranks(script, [str(model_folder), json.dumps(cases)], 1)
    for case, reads in json.loads(output.splitlines()[-1]).items():
        assert 0 < sum(reads.values()) <= MOST, f"{case}: {json.dumps(reads, indent=2)}"
