"""The main job, whole, with real Ray, Megatron and vLLM: as a newcomer runs it, with more to look at."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_lite import train
from nemo_rl_lite.report.page import page
from nemo_rl_lite.report.record import ROLLOUTS, SAMPLES, read_run
from nemo_rl_lite.rollout.store import read_rollout, rollout_files
from tests.functional.conftest import run_command
from tests.metric_names import not_logged, undocumented

pytestmark = pytest.mark.functional

# Enough to see it learn. The slow tests take the 30 steps of its configuration.
STEPS = 12
OVERRIDES = [
    "cluster.threads_per_worker=1",
    "+policy.offload_optimizer_states_for_logprob=true",
    "logger.wandb_enabled=true",
    "logger.wandb.mode=offline",
    "logger.tensorboard_enabled=true",
    "profile.steps=[2]",
    "refit.bucket_bytes=500000",
    f"algorithm.max_num_steps={STEPS}",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> subprocess.CompletedProcess:
    return quickstart(tmp_path_factory.mktemp("quickstart"), *OVERRIDES)


def quickstart(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "nemo_rl_lite.quickstart", *overrides]
    environ = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def run(done) -> tuple[Path, str, list[dict]]:
    """The run's folder, what it said, its metrics."""
    folder = Path(done.stdout.rpartition(" run=")[2].strip())
    return folder, done.stdout, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_learns(done):
    before, after = accuracies(done, STEPS)
    assert after - before >= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_it_learns_with_any_seed(tmp_path, seed):
    before, after = accuracies(quickstart(tmp_path, f"algorithm.seed={seed}"), 30)
    assert after - before >= 0.3


def accuracies(done: subprocess.CompletedProcess, expected_steps: int) -> tuple[float, float]:
    """Before and after, from the last line."""
    pattern = r"RESULT accuracy_before=([\d.]+) accuracy_after=([\d.]+) seconds=([\d.]+) steps=(\d+) run=(\S+)"
    before, after, _, steps, _ = re.fullmatch(pattern, done.stdout.splitlines()[-1]).groups()
    assert int(steps) == done.stdout.count("\nstep ") == expected_steps
    return float(before), float(after)


def test_engine_and_policy_agree_after_every_refit(run):
    _, _, metrics = run
    steps = [line for line in metrics if "train/loss" in line]
    assert len(steps) == STEPS
    probed = [line["refit/probe_logprob_diff"] for line in metrics if "refit/probe_logprob_diff" in line]
    # Each step checks the refit before it; the last refit is checked at the end.
    assert len(probed) == sum("refit/seconds" in line for line in metrics) == STEPS + 1
    assert all(0 <= difference < 1e-4 for difference in probed)
    for line in steps:
        assert line["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
        assert line["train/logprob_abs_diff_max"] < 1e-4
        assert line["refit/buckets"] > 5 and line["refit/bytes"] > 3_000_000


def test_a_second_run_in_the_same_folder_is_refused(run, model_folder, capsys):
    folder, _, metrics = run
    with pytest.raises(SystemExit) as end:
        train.main(run_command(folder, model_folder)[3:])
    errors = capsys.readouterr().err
    assert end.value.code == 2 and "holds a run already" in errors and "Traceback" not in errors
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == len(metrics)


def test_every_metric_is_documented_and_logged(run):
    _, _, metrics = run
    names = set().union(*metrics)
    assert undocumented(names) == [] and not_logged(names, "all", "GRPO", "moves") == []
    # A CPU's limits are not known.
    assert not [name for name in names if name.endswith(("_fp_utilization", "_bandwidth_share"))]
    rates = [line["performance/generation_read_gb_per_sec_per_gpu"] for line in metrics if "train/loss" in line]
    assert len(rates) == STEPS and min(rates) > 0


def test_the_console_is_clean_and_shows_samples(done, run):
    """What frameworks print is in the workers' logs."""
    folder, output, _ = run
    assert json.loads((folder / "summary.json").read_text())["advice"] == []
    (note,) = done.stderr.splitlines()
    assert "no effect" in note and "policy.offload_optimizer_states_for_logprob" in note
    frameworks = ("INFO", "WARNING", "raylet", "pid=", "vllm.", "megatron", "wandb:")
    assert [line for line in output.splitlines() if any(word in line for word in frameworks)] == []
    assert output.count("samples of step") == STEPS // 10 and "response" in output
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
    for name in ("config.json", "command.txt", "environment.json", "metrics.jsonl", "summary.json", "report.html"):
        assert (folder / name).stat().st_size > 0, name
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    rollouts = {file.stem: read_rollout(file) for file in rollout_files(folder)}
    validated = {f"step-{step:08d}-validation": 300 for step in (*range(0, STEPS, 10), STEPS)}
    trained = {f"step-{step:08d}-train": 512 for step in range(1, STEPS + 1)}
    assert {name: len(rows) for name, rows in rollouts.items()} == validated | trained
    record, shown = read_run(folder), ROLLOUTS + len(validated)
    assert record.notes == [] and len(record.samples) == shown * SAMPLES and len(page([record])) < 500_000
    assert json.loads((folder / "config.json").read_text())["policy"]["offload_optimizer_states_for_logprob"] is True
    assert list(folder.glob("tensorboard/events*")) and list(folder.glob("wandb/offline-run-*/*.wandb"))
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(lines) == STEPS and all("generate" in line and "refit" in line for line in lines)
    assert "Traceback" not in output and "held-out accuracy" in output


@pytest.mark.slow
def test_one_can_chat_with_it(run):
    """A conversation of two turns, and a new one, greedily: transformers says the same to each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _, _ = run
    command = [sys.executable, "-m", "nemo_rl_lite.chat", str(folder), "--temperature", "0"]
    said = "7310\n92\n/reset\n4815\n/quit\nnever asked\n"
    done = subprocess.run(command, input=said, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    model, tokenizer = (kind.from_pretrained(folder / "hf") for kind in (AutoModelForCausalLM, AutoTokenizer))

    def answer(*messages: str) -> str:
        chat = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(messages)]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        return tokenizer.decode(tokens, skip_special_tokens=True)

    first, second, other = done.stdout.splitlines()
    assert (first, second, other) == (answer("7310"), answer("7310", first, "92"), answer("4815"))


def test_the_exported_model_is_the_trained_one(run):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _, _ = run
    (start,) = (folder.parents[2] / "cache" / "nemo_rl_lite" / "models").iterdir()
    before, after = load_file(start / "model.safetensors"), load_file(folder / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert AutoModelForCausalLM.from_pretrained(folder / "hf").num_parameters() == 796032
    assert AutoTokenizer.from_pretrained(folder / "hf").chat_template
