"""Whole runs through the command line, with real Ray, Megatron and vLLM."""

import gzip
import json
import subprocess

import pytest

from nemo_rl_lite.rollout.files import read_rollout, rollout_files
from nemo_rl_lite.run.report.page import page
from nemo_rl_lite.run.report.record import SAMPLES, read_run
from tests.functional.conftest import STDERR_FILE, run_command, train
from tests.metric_names import not_logged, undocumented

pytestmark = pytest.mark.functional

SMALL = ["algorithm.max_num_steps=2", "algorithm.num_prompts_per_step=8", "algorithm.max_val_samples=40"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("run") / "run"
    overrides = [
        "policy.train_global_batch_size=64",
        "policy.train_micro_batch_size=32",
        "+policy.offload_optimizer_states_for_logprob=true",
        "logger.wandb_enabled=true",
        "logger.wandb.mode=offline",
        "logger.tensorboard_enabled=true",
        "logger.show_samples_period=1",
        "profile.steps=[2]",
        "refit.bucket_bytes=500000",
        "reward.name=tests.functional.rewards.share_of_digits",
    ]
    return folder, *train(folder, model_folder, *SMALL, *overrides, plots=True)


def test_step_one_is_exactly_on_policy(run):
    _, _, metrics = run
    first = next(line for line in metrics if "train/loss" in line)
    assert first["step"] == 1
    assert first["train/kl_penalty"] == 0
    assert first["train/probs_ratio_min"] == first["train/probs_ratio_max"] == 1


def test_engine_and_policy_agree_after_every_refit(run):
    _, _, metrics = run
    steps = [line for line in metrics if "train/loss" in line]
    assert len(steps) == 2
    probed = [line["refit/probe_logprob_diff"] for line in metrics if "refit/probe_logprob_diff" in line]
    # Each step checks the refit before it; the last refit is checked at the end.
    assert len(probed) == sum("refit/seconds" in line for line in metrics) == 3
    assert all(0 <= difference < 1e-4 for difference in probed)
    for line in steps:
        assert line["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
        assert line["train/logprob_abs_diff_max"] < 1e-4
        assert line["refit/buckets"] > 5 and line["refit/bytes"] > 3_000_000


def test_the_learning_rate_warms_up(run):
    _, _, metrics = run
    rates = [line["train/lr"] for line in metrics if "train/lr" in line]
    assert rates == pytest.approx([0, 3e-4 / 4])


def test_a_second_run_in_the_same_folder_is_refused(run, model_folder):
    folder, _, metrics = run
    done = subprocess.run(run_command(folder, model_folder), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2 and "holds a run already" in done.stderr and "Traceback" not in done.stderr
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == len(metrics)


def test_every_metric_is_documented_and_logged(run):
    _, _, metrics = run
    names = set().union(*metrics)
    assert undocumented(names) == [] and not_logged(names, "all", "GRPO", "moves") == []


def test_the_console_is_clean_and_shows_samples(run):
    """What frameworks print is in the workers' logs."""
    folder, output, _ = run
    assert (folder / STDERR_FILE).read_text() == ""
    frameworks = ("INFO", "WARNING", "raylet", "pid=", "vllm.", "megatron", "wandb:")
    assert [line for line in output.splitlines() if any(word in line for word in frameworks)] == []
    assert output.count("samples of step") == 2 and "response" in output
    assert "vllm" in (folder / "logs" / "generation-0.log").read_text()


def test_the_profiled_step_has_a_trace_for_each_process_with_its_phases(run):
    folder, _, _ = run
    (step,) = (folder / "profile").iterdir()
    expected = {
        "driver": {"generation", "policy_and_reference_logprobs", "policy_training", "total_step_time"},
        "policy-0": {"logprobs", "train", "refit", "micro-batch 1", "micro-batch 2"},
        "generation-0": {"generate", "refit"},
    }
    assert step.name == "step-00000002" and len(list(step.iterdir())) == len(expected)
    for process, phases in expected.items():
        with gzip.open(step / f"{process}.json.gz") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert phases <= names, phases - names


def test_the_run_folder_is_complete(run):
    folder, output, _ = run
    for name in ("config.json", "command.txt", "environment.json", "metrics.jsonl", "summary.json", "plots/run.png"):
        assert (folder / name).stat().st_size > 0, name
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    rollouts = {file.stem: read_rollout(file) for file in rollout_files(folder)}
    assert {name: len(rows) for name, rows in rollouts.items()} == {
        "step-00000000-validation": 40,
        "step-00000001-train": 64,
        "step-00000002-train": 64,
        "step-00000002-validation": 40,
    }
    record = read_run(folder)
    assert record.notes == [] and len(record.samples) == 4 * SAMPLES and len(page([record])) < 500_000
    assert json.loads((folder / "config.json").read_text())["policy"]["offload_optimizer_states_for_logprob"] is True
    assert list(folder.glob("tensorboard/events*")) and list(folder.glob("wandb/offline-run-*/*.wandb"))
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(lines) == 2 and all("generate" in line and "refit" in line for line in lines)
    assert "Traceback" not in output and "held-out accuracy" in output


def test_the_exported_model_is_the_trained_one(run, model_folder):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _, _ = run
    before, after = load_file(model_folder / "model.safetensors"), load_file(folder / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert AutoModelForCausalLM.from_pretrained(folder / "hf").num_parameters() == 796032
    assert AutoTokenizer.from_pretrained(folder / "hf").chat_template


def test_four_policy_ranks_and_two_transformers_engines(tmp_path, model_folder):
    """Tensor parallel 2 x data parallel 2: batches are split, results put together, shards gathered for the refit."""
    overrides = [
        "cluster.cpu_ranks=4",
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "generation=transformers",
        "generation.data_parallel_size=2",
        "policy.train_global_batch_size=64",
        "policy.train_micro_batch_size=32",
        "algorithm.val_at_start=false",
        "algorithm.val_at_end=false",
        "checkpoint.export_hf_at_end=false",
    ]
    _, metrics = train(tmp_path / "run", model_folder, *SMALL, *overrides)
    steps = [line for line in metrics if "train/loss" in line]
    assert [line["train/token_mult_prob_error"] for line in steps] == pytest.approx([1, 1], abs=1e-5)
    assert steps[0]["train/kl_penalty"] == 0 and steps[0]["train/probs_ratio_max"] == 1
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {
        "policy-0.log",
        "policy-1.log",
        "policy-2.log",
        "policy-3.log",
        "generation-0.log",
        "generation-1.log",
    }
