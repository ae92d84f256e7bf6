"""Router replay takes most of the mismatch between policy and engine away, in whole runs on a GPU."""

import statistics
from pathlib import Path

import pytest

from tests.gpu.test_run import PARALLEL, run

OVERRIDES = ["+generation.vllm_kwargs.moe_backend=triton"]
SEQUENCE = "policy.megatron_cfg.sequence_parallel=true"
# The layout, its GPUs and its overrides.
LAYOUTS = {
    "one GPU": (1, []),
    "recomputed": (1, ["policy.megatron_cfg.activation_checkpointing=true"]),
    "experts 2": (2, [PARALLEL.format("expert_model")]),
    "tensor 2, sequence parallel": (2, [PARALLEL.format("tensor_model"), SEQUENCE]),
    "pipeline 2, recomputed": (
        2,
        [PARALLEL.format("pipeline_model"), "policy.megatron_cfg.activation_checkpointing=true"],
    ),
    "context 2": (2, [PARALLEL.format("context")]),
}


def mismatch(folder: Path, model: Path, layout: str, replays: bool) -> float:
    gpus, own = LAYOUTS[layout]
    metrics = run(folder, model, gpus, *OVERRIDES, *own, f"policy.router_replay.enabled={str(replays).lower()}")
    steps = [line for line in metrics if "train/loss" in line]
    assert len(steps) == 3
    return statistics.mean(line["train/gen_kl_error"] for line in steps)


@pytest.fixture(scope="module")
def without(gpu_experts_model, tmp_path_factory) -> float:
    return mismatch(tmp_path_factory.mktemp("without") / "run", gpu_experts_model, "one GPU", replays=False)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.gpu(LAYOUTS[name][0])) for name in LAYOUTS])
def test_half_of_the_mismatch_or_less_is_left(layout, without, gpu_experts_model, tmp_path):
    assert mismatch(tmp_path / "run", gpu_experts_model, layout, replays=True) <= without / 2
