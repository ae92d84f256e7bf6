"""GRPO with LoRA on one GPU: engines that get merged weights, and engines that apply the adapters themselves."""

import re
from pathlib import Path

import pytest

from tests.functional.conftest import train
from tests.functional.supervised import DPO, series, write_pairs
from tests.gpu.test_run import SMALL

PEFT = "policy.megatron_cfg.peft"
# Adapters so strong that an engine without them would be far from the policy.
LORA = [
    *(f"{PEFT}.enabled=true", "policy.megatron_cfg.optimizer.lr=1e-2"),
    *("algorithm.loss_fn.reference_policy_kl_penalty=0.01", "algorithm.val_at_start=false"),
    *("reward.name=tests.functional.rewards.share_of_digits", "reward.timeout_s=600"),
]


def run(folder: Path, model: Path, way: str, *overrides: str, dim: int = 16) -> list[dict]:
    own = ["cluster.gpus_per_node=1", *LORA, f"generation.vllm_cfg.lora={way}", *overrides]
    own += [f"{PEFT}.dim={dim}", f"{PEFT}.alpha={2 * dim}"]
    return train(folder, model, *SMALL, *own, timeout_s=400)[1]


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize(("way", "dim"), [("merged", 16), ("adapters", 16), ("adapters", 12)])
def test_policy_and_engine_agree_while_adapters_grow(gpu_model, tmp_path, way, dim):
    metrics = run(tmp_path / "run", gpu_model, way, "generation.colocated.sleep=true", dim=dim)
    assert len(series(metrics, "refit/seconds")) == 4
    assert max(series(metrics, "refit/probe_logprob_diff")) < 0.2
    penalties, differences = series(metrics, "train/kl_penalty"), series(metrics, "train/logprob_abs_diff_mean")
    assert penalties[0] == pytest.approx(0, abs=1e-6) and penalties[-1] > 0.1
    assert max(differences) < 0.05
    for line in metrics:
        if "train/loss" in line:
            # Also an engine that keeps its weights leaves the GPU to the policy.
            assert line["memory/device_bytes/train"] < line["memory/device_bytes/generate"] / 2


@pytest.mark.gpu
def test_adapters_are_copied_from_where_they_are(gpu_model, tmp_path):
    metrics = run(tmp_path / "run", gpu_model, "adapters")
    found = logs(tmp_path / "run")
    assert "transport of refits: direct" in found and "copies out of the policy's parameters" in found
    assert "the engine's loader loads at each refit" not in found and "every refit goes through buckets" not in found
    weights = sum(path.stat().st_size for path in gpu_model.glob("*.safetensors"))
    assert max(series(metrics, "refit/bytes")) < weights / 10


@pytest.mark.gpu
def test_frozen_weights_are_in_one_copy_and_training_is_the_same(gpu_model, tmp_path):
    awake = "generation.colocated.sleep=false"
    shares = run(tmp_path / "shared", gpu_model, "adapters", awake)
    apart = run(tmp_path / "apart", gpu_model, "adapters", awake, "refit.cuda_ipc=false")
    (line,) = re.findall(
        r"frozen weights: ([\d.]+) MiB are the engine's, ([\d.]+) MiB are here", logs(tmp_path / "shared")
    )
    shared, twice = map(float, line)
    assert shared > 2 * twice
    assert "frozen weights:" not in logs(tmp_path / "apart")
    for metrics in (shares, apart):
        assert max(series(metrics, "refit/probe_logprob_diff")) < 0.2
        assert max(series(metrics, "train/logprob_abs_diff_mean")) < 0.05
    # The first step has the same rollouts, and the same weights at the same places of each matrix.
    for metric in ("train/loss", "train/grad_norm"):
        assert series(shares, metric)[0] == pytest.approx(series(apart, metric)[0], rel=1e-3, abs=1e-6)
    for kind in ("measured", "predicted"):
        held = [series(metrics, f"memory/{kind}/train/parameters")[-1] for metrics in (shares, apart)]
        assert held[1] - held[0] == pytest.approx(shared * 2**20, rel=0.05)


@pytest.mark.gpu
def test_adapters_of_a_captured_engine_are_those_of_an_eager_one(gpu_model, tmp_path):
    graphs, eager = (
        run(tmp_path / name, gpu_model, "adapters", f"generation.vllm_cfg.enforce_eager={name}")
        for name in ("false", "true")
    )
    for metrics in (graphs, eager):
        assert max(series(metrics, "train/logprob_abs_diff_mean")) < 0.05


@pytest.mark.gpu
def test_preferences_are_learned_by_adapters(gpu_model, tmp_path):
    own = [option for option in DPO if "micro_batch_size" not in option]
    own += [*write_pairs(tmp_path), "policy=megatron_gpu", "cluster.gpus_per_node=1"]
    own += [f"{PEFT}.enabled=true", "policy.max_total_sequence_length=64", "policy.megatron_cfg.optimizer.lr=1e-2"]
    _, metrics = train(tmp_path / "run", gpu_model, *own, timeout_s=400)
    losses = series(metrics, "validation/val_loss")
    # The reference is the model without adapters, whose B begins at zero: the first loss is ln 2.
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.6
    assert series(metrics, "train/loss")[0] == pytest.approx(0.6931, abs=1e-3)
