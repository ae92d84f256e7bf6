"""Checkpoints of a policy on a GPU: Transformer Engine's optimizer, moved states, adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_lite.losses.interface import combine_metrics
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "functional" / "checkpoint_rank.py"
GPU = ["policy=megatron_gpu", "cluster.gpus_per_node=1", "policy.sequence_length_round=16"]
# What checkpoint_rank.py adds.
COMMON = ["algorithm=sft", "policy.train_global_batch_size=8", "policy.train_micro_batch_size=4"]
OPTIMIZER = "policy.megatron_cfg.optimizer"
MOMENTS = [f"{OPTIMIZER}.use_precision_aware_optimizer=true"]
MOMENTS += [f"{OPTIMIZER}.{name}=bfloat16" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
SETTINGS = {
    "fused": [],
    "moved": ["policy.use_pinned_optimizer_offload=true", "policy.offload_optimizer_states_for_logprob=true"],
    "lora": ["policy.megatron_cfg.peft.enabled=true"],
    "moments": MOMENTS,
    "on the host": ["offload=cpu_optimizer"],
    "half on the host": [
        "offload=cpu_optimizer",
        "policy.megatron_cfg.optimizer.optimizer_offload_fraction=0.5",
        "policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d=true",
    ],
}
CASES: dict[str, Any] = {name: [[*GPU, *own], None] for name, own in SETTINGS.items()}
CASES |= {f"{name} again": [[*GPU, *own], name] for name, own in SETTINGS.items()}
CASES["fused from on the host"] = [GPU, "on the host"]
CASES["half on the host from fused"] = [[*GPU, *SETTINGS["half on the host"]], "fused"]
TWO, SHARED = ["cluster.gpus_per_node=2"], "policy.megatron_cfg.context_parallel_size=2"
CONTEXT: dict[str, Any] = {
    "context": [[*GPU, *TWO, SHARED], None],
    "context again": [[*GPU, *TWO, SHARED], "context"],
    "data from context": [[*GPU, *TWO], "context"],
}
ALONE: dict[str, Any] = {"one from context": [GPU, "context"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gpu_model):
    output = tmp_path_factory.mktemp("checkpoints")
    run_ranks(SCRIPT, [str(gpu_model), str(output), json.dumps(CASES)], ranks=1, timeout_s=500)
    return output


@pytest.fixture(scope="module")
def context_folder(tmp_path_factory, gpu_model):
    output = tmp_path_factory.mktemp("context")
    for cases, ranks in ((CONTEXT, 2), (ALONE, 1)):
        run_ranks(SCRIPT, [str(gpu_model), str(output), json.dumps(cases)], ranks, timeout_s=500)
    return output


@pytest.mark.parametrize("case", [name for name, (_, saved_by) in CASES.items() if saved_by])
def test_it_goes_on_as_it_would_have(folder, case):
    """Up to what attention's backward pass on a GPU adds up in one order or another."""
    check(folder, case, CASES[case][1])


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", [name for name, (_, saved_by) in {**CONTEXT, **ALONE}.items() if saved_by])
def test_context_parallel_ranks_save_as_replicas_do(context_folder, case):
    """What they have saved is read by them, by replicas, and by a rank alone."""
    check(context_folder, case, {**CONTEXT, **ALONE}[case][1])


def check(folder: Path, case: str, saved_by: str) -> None:
    first, second = (steps_of(json.loads((folder / f"{name}.json").read_text())) for name in (saved_by, case))
    for one, other in zip(first, second, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
    own, expected = (load_file(folder / f"{name}.hf" / "model.safetensors") for name in (case, saved_by))
    assert all(torch.allclose(own[name], expected[name], atol=2e-3, rtol=2e-2) for name in expected)


def steps_of(replicas: list[dict]) -> list[dict[str, float]]:
    """The metrics of each step, from each replica's share."""
    steps = zip(*(own["steps"] for own in replicas), strict=True)
    return [combine_metrics(shares) | {"grad_norm": shares[0]["grad_norm"]} for shares in steps]


@pytest.mark.parametrize("case", SETTINGS)
def test_a_skipped_step_and_a_full_disk_change_nothing(folder, case):
    (own,) = json.loads((folder / f"{case}.json").read_text())
    assert own["after a skipped step"] == {"same": True, "counted": True}
    assert "Worker failure" in own["a full disk"]
