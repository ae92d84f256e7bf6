"""FP8 training, and experts that ranks split or exchange by another library, in whole runs on GPUs."""

from importlib.util import find_spec

import pytest

from tests.gpu.test_run import PARALLEL, run

MEGATRON = "policy.megatron_cfg"
FLEX = [f"{MEGATRON}.moe_token_dispatcher_type=flex", f"{MEGATRON}.moe_router_dtype=fp32"]
TRITON = "+generation.vllm_kwargs.moe_backend=triton"


def first_step(metrics: list[dict]) -> dict[str, float]:
    return next(line for line in metrics if "train/loss" in line)


@pytest.mark.gpu(1)
def test_fp8_is_near_bfloat16(gpu_model, tmp_path):
    runs = [run(tmp_path / value, gpu_model, 1, f"{MEGATRON}.fp8_cfg.enabled={value}") for value in ("false", "true")]
    plain, eight = map(first_step, runs)
    # It computes something else, but not much.
    assert plain["train/gen_kl_error"] < eight["train/gen_kl_error"] < 0.1
    assert eight["train/probs_ratio"] == pytest.approx(1, abs=1e-3)
    assert eight["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=0.3)


def check_experts(metrics: list[dict]) -> None:
    """Policy and engine agree on the samples, and the first step has no off-policy ratio."""
    step = first_step(metrics)
    assert step["train/gen_kl_error"] < 0.1 and step["train/probs_ratio"] == pytest.approx(1, abs=1e-3)


@pytest.mark.gpu(2)
def test_split_experts(gpu_experts_model, tmp_path):
    split = f"{MEGATRON}.expert_tensor_parallel_size=2"
    check_experts(run(tmp_path / "run", gpu_experts_model, 2, TRITON, split))


@pytest.mark.gpu(2)
@pytest.mark.skipif(find_spec("deep_ep") is None, reason="needs the package deep_ep")
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_experts_that_another_library_exchanges(backend, gpu_experts_model, tmp_path):
    own = [PARALLEL.format("expert_model"), *FLEX, f"{MEGATRON}.moe_flex_dispatcher_backend={backend}"]
    check_experts(run(tmp_path / "run", gpu_experts_model, 2, TRITON, *own))
