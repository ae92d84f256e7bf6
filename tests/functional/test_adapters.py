"""Adapters without the weights: as the policy exports them, and in whole runs with engines that apply them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_lite.config.schema import LoraConfig
from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.models.shape import model_shape
from nemo_rl_lite.planning.parameters import served_adapters
from tests.functional.here import train_here
from tests.functional.ranks import run_ranks
from tests.functional.supervised import series

pytestmark = pytest.mark.functional

PEFT = "policy.megatron_cfg.peft"
LORA = [f"{PEFT}.enabled=true", f"{PEFT}.dim=4", f"{PEFT}.alpha=6"]
TENSOR, PIPELINE = (f"policy.megatron_cfg.{kind}_model_parallel_size=2" for kind in ("tensor", "pipeline"))
TARGETS = {"linear_qkv": ["q", "k", "v"], "linear_proj": ["o"], "linear_fc1": ["gate", "up"], "linear_fc2": ["down"]}
SMALL = [
    *("algorithm.num_prompts_per_step=4", "algorithm.num_generations_per_prompt=4", "algorithm.max_num_steps=3"),
    *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8", "policy.logprob_batch_size=8"),
    *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "policy.megatron_cfg.optimizer.lr=3e-2"),
    *("reward.name=tests.functional.rewards.share_of_digits", "reward.timeout_s=600"),
    "algorithm.loss_fn.reference_policy_kl_penalty=0.1",
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, model_folder):
    """What each layout of the policy exports."""
    folder, script = tmp_path_factory.mktemp("adapters"), Path(__file__).with_name("adapters_rank.py")
    for ranks, layouts in (
        (1, {"one": LORA, "attention": [*LORA, f"{PEFT}.target_modules=[linear_qkv,linear_proj]"]}),
        (2, {"tensor": [*LORA, "cluster.cpu_ranks=2", TENSOR], "pipeline": [*LORA, "cluster.cpu_ranks=2", PIPELINE]}),
    ):
        run_ranks(script, [str(model_folder), str(folder), json.dumps(layouts)], ranks)
    return {path.name: torch.load(path, weights_only=False) for path in folder.iterdir()}


@pytest.mark.parametrize("layout", ["one", "attention", "tensor", "pipeline"])
def test_adapters_are_those_that_are_merged(exported, model_folder, layout):
    before, kept = load_file(model_folder / "model.safetensors"), exported[layout]
    adapters, merged = kept["adapters"], kept["merged"]
    assert before.keys() == merged.keys()
    adapted = set()
    for name, weight in merged.items():
        first, second = (adapters.get(name.replace(".weight", f".lora_{which}.weight")) for which in "AB")
        if first is None:
            assert torch.equal(weight, before[name]), name
            continue
        adapted.add(name)
        assert first.shape == (4, weight.shape[1]) and second.shape == (weight.shape[0], 4)
        change = 6 / 4 * second @ first
        assert change.abs().max() > 0.01
        torch.testing.assert_close(weight, before[name] + change, atol=1e-5, rtol=1e-5)
    targets = ["linear_qkv", "linear_proj"] if layout == "attention" else list(TARGETS)
    parts = [f"{part}_proj" for target in targets for part in TARGETS[target]]
    assert adapted == {name for name in before if any(part in name for part in parts)}
    assert len(adapters) == 2 * len(adapted)


@pytest.mark.parametrize("layout", ["one", "attention", "tensor", "pipeline"])
def test_adapters_are_put_together_without_the_bridge(exported, layout):
    kept = exported[layout]
    assert set(kept["unlike"]) == {None} and kept["assembles"] == "BucketReshard"
    assert sorted(kept["names"]) == sorted(kept["adapters"])


@pytest.mark.parametrize("layout", ["one", "attention"])
def test_plans_know_how_many_elements_a_refit_brings(exported, layout):
    targets = list(TARGETS) if layout == "one" else ["linear_qkv", "linear_proj"]
    config = LoraConfig(enabled=True, dim=4, alpha=6, dropout=0, target_modules=targets)
    elements = sum(tensor.numel() for tensor in exported[layout]["adapters"].values())
    assert served_adapters(model_shape(MODEL_CONFIG), config) == elements


def test_engines_that_apply_adapters_agree_with_the_policy(tmp_path, model_folder):
    engine = ["generation.vllm_cfg.lora=adapters"]
    _, metrics = train_here(tmp_path / "run", model_folder, *SMALL, *LORA, *engine, elsewhere=["generation"])
    check(metrics, model_folder)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_so_do_they_with_shards_of_some_adapters(shared, tmp_path, model_folder):
    """With layers of which the engine has no adapters. On other devices, vLLM receives windows."""
    some = ["cluster.cpu_ranks=2", TENSOR, f"{PEFT}.target_modules=[linear_fc1]", "generation.vllm_cfg.lora=adapters"]
    # vLLM pads rank 4 to 8, and windows are contiguous in its weights.
    some += [] if shared else ["generation.colocated.enabled=false", f"{PEFT}.dim=8"]
    _, metrics = train_here(tmp_path / "run", model_folder, *SMALL, *LORA, *some, elsewhere=["policy", "generation"])
    check(metrics, model_folder)
    first, *others = series(metrics, "refit/buckets")
    # Both policy ranks send windows.
    assert first == 1 and set(others) == {1 if shared else 2}


@pytest.mark.slow
def test_a_resumed_run_sends_windows_of_adapters_that_the_engine_has_scaled(tmp_path, model_folder):
    run, ranks = tmp_path / "run", ["cluster.cpu_ranks=2", TENSOR, f"{PEFT}.dim=8"]
    apart = ["generation.colocated.enabled=false", "generation.vllm_cfg.lora=adapters", "checkpoint.save_period=2"]
    for steps in (2, 4):
        common = [*SMALL, *LORA, *ranks, *apart, f"algorithm.max_num_steps={steps}"]
        output, metrics = train_here(run, model_folder, *common, elsewhere=["policy", "generation"])
    assert "resuming after step 2" in output and "windows of" not in output
    buckets, nbytes = series(metrics, "refit/buckets"), series(metrics, "refit/bytes")
    # Of two times three refits, the first goes through rank 0. Then both policy ranks send.
    assert buckets == [1, 2, 2] * 2
    # Queries, keys and values have one A in the policy, which is sent once.
    whole, part = nbytes[:2]
    assert nbytes == [whole, part, part] * 2 and part < whole
    check(metrics, model_folder)


def check(metrics: list[dict], model_folder: Path) -> None:
    penalties = series(metrics, "train/kl_penalty")
    # A KL of 1e-4 is a difference of about 0.01 of logprobs, which an engine without the adapters would have.
    assert penalties[0] == pytest.approx(0, abs=1e-7) and penalties[-1] > 1e-4
    assert max(series(metrics, "train/logprob_abs_diff_mean")) < 1e-4
    assert max(series(metrics, "refit/probe_logprob_diff")) < 1e-4
    weights = (model_folder / "model.safetensors").stat().st_size
    assert max(series(metrics, "refit/bytes")) < weights / 10
