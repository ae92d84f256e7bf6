"""Engines that generate all the time: whatever stops them or the run, every prompt is trained once."""

import json
import math
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.formats import problems
from nemo_rl_lite.data.sources import training_set
from nemo_rl_lite.rollout.store import read_rollout, rollout_files, step_of
from nemo_rl_lite.validation.compose import compose_config
from tests.functional.conftest import run_command
from tests.functional.here import run_here, train_here
from tests.functional.rewards import Gate
from tests.functional.test_failures import Run

pytestmark = pytest.mark.functional

STEPS, STOPPED_IN, PROMPTS, MAX_AGE = 8, 3, 4, 2
QUEUE = [
    *("algorithm.rollouts.source=queue", f"algorithm.rollouts.max_trajectory_age_steps={MAX_AGE}"),
    *("generation.data_parallel_size=2", "generation.colocated.enabled=false", "cluster.max_restarts=1"),
    # Responses are long, and an engine has few at a time, so rollouts are under way at almost every moment.
    *("generation.max_new_tokens=48", "policy.max_total_sequence_length=64", "generation.vllm_cfg.max_num_seqs=8"),
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
    *(f"algorithm.max_num_steps={STEPS}", f"algorithm.num_prompts_per_step={PROMPTS}"),
    *("policy.train_global_batch_size=32", "policy.train_micro_batch_size=32", "policy.logprob_batch_size=32"),
    *("algorithm.max_val_samples=4", "algorithm.val_period=0", "checkpoint.save_period=5", "logger.plots=false"),
]


@pytest.fixture
def run(tmp_path, model_folder, gate):
    """The command, which has begun; nothing of it outlives the test."""
    run = Run(tmp_path / "run", run_command(tmp_path / "run", model_folder, *QUEUE, *gate.overrides))
    yield run
    for process in run.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Rewards of later steps wait until the run has been asked to end, so that it cannot be done before."""
    gate = Gate(tmp_path / "run")
    for name, value in gate.environment.items():
        monkeypatch.setenv(name, value)
    gate.passed(STOPPED_IN)
    return gate


def trained(folder: Path) -> dict[int, list[str]]:
    """The prompts that each step has trained on."""
    files = [file for file in rollout_files(folder) if file.name.endswith("-train.parquet")]
    return {step_of(file): [row["prompt"][0]["content"] for row in read_rollout(file)[::8]] for file in files}


def first_of_the_data(count: int) -> list[str]:
    config = compose_config()
    data = training_set(config.data, config.options(GRPOConfig).seed, problems())
    return [data.problem(position).messages[0]["content"] for position in range(count)]


def test_partial_rollouts_train_every_prompt_once_and_responses_continue_after_a_refit(tmp_path, model_folder):
    """The engine has few responses at a time, so a step leaves some of later steps unfinished."""
    colocated = [one for one in QUEUE if not one.startswith(("generation.data_parallel", "generation.colocated"))]
    folder, steps = tmp_path / "run", 4
    own = *colocated, "generation.colocated.sleep=true", f"algorithm.max_num_steps={steps}"
    _, metrics = train_here(folder, model_folder, *own, elsewhere=["generation"])
    found = trained(folder)
    assert [prompt for step in range(1, steps + 1) for prompt in found[step]] == first_of_the_data(steps * PROMPTS)
    measured = [line for line in metrics if "train/loss" in line]
    assert [line["train/trajectory_age_max"] for line in measured[:2]] == [0, 1]
    means = [line["train/trajectory_age_mean"] for line in measured]
    assert any(mean % 1 for mean in means) and max(means) <= MAX_AGE
    assert all(line["train/gen_kl_error"] < 0.05 for line in measured)


def test_an_engine_dies_and_the_run_is_stopped_and_every_prompt_is_trained_once(run, gate, model_folder):
    run.wait_for(rf"^step +1/{STEPS}")
    os.kill(run.worker("generation-1"), signal.SIGKILL)
    run.wait_for("the engine has restarted")
    run.wait_for(rf"^step +{STOPPED_IN}/{STEPS}")
    os.kill(run.process.pid, signal.SIGTERM)
    gate.passed(STEPS)
    errors = run.end()
    stopped = int(errors.partition("stopped after step ")[2].partition(" ")[0])
    assert run.process.returncode == 75 and STOPPED_IN <= stopped < STEPS, errors[-3000:]
    saved = run.folder / "checkpoints" / f"step-{stopped:08d}"
    ahead = json.loads((saved / "checkpoint.json").read_text())["record"]["rollouts"]["ahead"]
    # One more has begun where the checkpoint is of after the step's refit.
    assert len(ahead) in (MAX_AGE * PROMPTS, (1 + MAX_AGE) * PROMPTS)
    assert len(ahead) == len(list(saved.glob("rollout-????????.parquet"))) * PROMPTS
    assert list(trained(run.folder)) == list(range(1, stopped + 1))
    assert run.survivors() == []

    resumed = run_here(run.folder, model_folder, *QUEUE, *gate.overrides, elsewhere=["generation"])
    assert resumed.returncode == 0 and (run.folder / "hf").is_dir(), resumed.stderr[-3000:]
    assert f"resuming after step {stopped}" in resumed.stdout and "is sampled again" not in resumed.stderr
    found, wanted = trained(run.folder), first_of_the_data(STEPS * PROMPTS)
    assert list(found) == list(range(1, STEPS + 1))
    assert sorted(prompt for own in found.values() for prompt in own) == sorted(wanted)
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    measured = {line["step"]: line for line in lines if "train/loss" in line}
    assert list(measured) == list(range(1, STEPS + 1))
    assert all(math.isfinite(one["train/loss"]) and one["train/grad_norm"] > 0 for one in measured.values())
    assert all(0 <= one["train/trajectory_age_max"] <= MAX_AGE for one in measured.values())
    assert measured[1]["train/trajectory_age_max"] == 0, "the first rollout has the first weights"
