"""Whole runs on four ranks: SFT, DPO and LoRA train as on one, and GRPO with two engines."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_lite.config.sizes import parallel_dims
from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.models.shape import model_shape
from nemo_rl_lite.planning.parameters import trained_parameters
from nemo_rl_lite.rollout.store import read_rollout, rollout_files
from nemo_rl_lite.validation.compose import compose_config
from tests.functional.conftest import train
from tests.functional.here import train_here
from tests.functional.ranks import run_ranks
from tests.functional.supervised import DPO, LORA, SFT, series, write_data, write_pairs
from tests.functional.test_lora import adapters_give_the_merged_weights, changed_by_a_low_rank

pytestmark = pytest.mark.functional

FOUR = ["cluster.cpu_ranks=4", "policy.megatron_cfg.tensor_model_parallel_size=2"]
KINDS = {
    # With a validation set that the ranks do not divide.
    "sft": (write_data, [*SFT, "algorithm.max_val_samples=13"]),
    "dpo": (write_pairs, DPO),
    "lora": (write_data, [*SFT, *LORA]),
}

GRPO = [
    "algorithm.max_num_steps=2",
    "algorithm.num_prompts_per_step=8",
    "algorithm.val_at_start=false",
    "algorithm.val_at_end=false",
    "reward.name=tests.functional.rewards.share_of_digits",
    "generation=transformers",
    "generation.data_parallel_size=2",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=32",
    "checkpoint.export_hf_at_end=false",
]
# With small buckets, because a replica that would send less than half of one sends nothing.
APART = [*GRPO, "generation.colocated.enabled=false", "refit.bucket_bytes=60000"]


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory) -> dict[int, Path]:
    """By ranks, the folder of each kind's run."""
    folders = {ranks: tmp_path_factory.mktemp(f"on-{ranks}") for ranks in (1, 4)}
    runs = {kind: [*options, *write(tmp_path_factory.mktemp(kind))] for kind, (write, options) in KINDS.items()}
    for kind, own in runs.items():
        train_here(folders[1] / kind, model_folder, *own)
    on_four = {kind: [*own, *FOUR] for kind, own in (runs | {"grpo": GRPO, "apart": APART}).items()}
    script = Path(__file__).with_name("run_rank.py")
    run_ranks(script, [str(model_folder), str(folders[4]), json.dumps(on_four)], 4)
    return folders


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_train_as_one_does(folders, kind):
    one, four = (metrics_of(folders[ranks] / kind) for ranks in (1, 4))
    names = ["train/loss", "validation/val_loss", "train/grad_norm", "train/global_valid_toks"]
    for name in [*names, "train/rewards_margin_mean"] if kind == "dpo" else names:
        assert series(four, name) == pytest.approx(series(one, name), abs=1e-4, rel=1e-4), name
    assert len(series(one, "train/loss")) == 6


@pytest.mark.parametrize("ranks", [1, 4])
def test_as_many_parameters_are_trained_as_predicted(folders, ranks):
    log = (folders[ranks] / "lora" / "logs" / "policy-0.log").read_text()
    trained, whole = map(int, re.findall(r"LoRA: (\d+) of (\d+) param", log)[0])
    config, shape = compose_config([*KINDS["lora"][1], *(FOUR if ranks == 4 else [])]), model_shape(MODEL_CONFIG)
    predicted = trained_parameters(
        shape, parallel_dims(config), config.policy.megatron_cfg.peft, stage=0, grouped=False
    )
    assert trained == predicted.total < whole / 4


def test_shards_of_adapters_are_exported_merged(folders, model_folder):
    changed_by_a_low_rank(folders[4] / "lora", model_folder)
    adapters_give_the_merged_weights(folders[4] / "lora", model_folder)
    one, four = (load_file(folders[ranks] / "lora" / "hf" / "model.safetensors") for ranks in (1, 4))
    assert all(torch.allclose(four[name], one[name], atol=2e-3) for name in one)


def test_four_policy_ranks_and_two_engines(folders):
    """Tensor parallel 2 x data parallel 2: batches are split, results put together, shards gathered for the refit."""
    check(folders[4] / "grpo")


def test_four_policy_ranks_send_windows_to_two_engines_apart(folders):
    """In every refit after the first, each rank sends a quarter: half of its shard, for its replica."""
    check(folders[4] / "apart")
    log = (folders[4] / "apart" / "logs" / "policy-0.log").read_text()
    (sent,) = re.findall(r"transport of refits: windows, (\d+) bytes to 1 sets", log)
    whole, *later = series(metrics_of(folders[4] / "apart"), "refit/bytes")
    assert int(sent) == pytest.approx(whole / 4, rel=0.1)
    # Each engine has one rank, which needs all weights.
    assert later == pytest.approx([whole] * 2, rel=0.01)


@pytest.mark.slow
def test_four_policy_ranks_and_two_engines_through_the_command_line(tmp_path, model_folder):
    train(tmp_path / "run", model_folder, *GRPO, *FOUR)
    check(tmp_path / "run")
    logs = {f"policy-{rank}.log" for rank in range(4)} | {f"generation-{rank}.log" for rank in range(2)}
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == logs


def check(folder: Path) -> None:
    metrics = metrics_of(folder)
    steps = [line for line in metrics if "train/loss" in line]
    assert [line["train/token_mult_prob_error"] for line in steps] == pytest.approx([1, 1], abs=1e-5)
    # Step one is exactly on-policy, and the learning rate warms up.
    assert steps[0]["train/kl_penalty"] == 0
    assert steps[0]["train/probs_ratio_min"] == steps[0]["train/probs_ratio_max"] == 1
    assert series(metrics, "train/lr") == pytest.approx([0, 3e-4 / 4])
    assert min(series(metrics, "train/grad_norm")) > 0
    # Each engine has sampled its share of the prompts, and has had every refit.
    assert [len(read_rollout(file)) for file in rollout_files(folder)] == [64, 64]
    assert len(series(metrics, "refit/probe_logprob_diff")) == 3
