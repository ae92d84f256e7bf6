"""Whatever a run is hit by, it ends with the same weights and metrics as one that was left alone."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from threading import Thread

import pytest

from nemo_rl_lite import export
from nemo_rl_lite.rollout.store import read_rollout, rollout_files
from tests.functional.conftest import PYTHONPATH, run_command, train
from tests.functional.here import run_here, train_here
from tests.functional.ranks import run_ranks
from tests.functional.rewards import Gate, listens
from tests.functional.supervised import series
from tests.functional.test_resume import assert_same_weights, metrics_of

pytestmark = pytest.mark.functional

TASK = [
    "algorithm.num_prompts_per_step=8",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=64",
    "policy.logprob_batch_size=64",
    "algorithm.max_val_samples=20",
    "algorithm.val_period=2",
    "checkpoint.keep_best=0",
    "checkpoint.save_period=2",
    "generation=transformers",
    "reward.name=tests.functional.rewards.share_of_digits",
]
GRPO = ["algorithm.max_num_steps=7", *TASK]
TRACKED = ["logger.wandb_enabled=true", "logger.wandb.mode=offline"]


def hit(
    folder: Path,
    model: Path,
    blows: dict[int, tuple[str, signal.Signals]],
    *overrides: str,
    awaited: tuple[int, str] = (0, ""),
) -> tuple[int, str]:
    """Run the command and send signals to its processes after steps; exit status and standard output. The step after
    the `awaited` one ends when the run has said this."""
    gate, output, reached = Gate(folder), "", 0
    command = run_command(folder, model, "logger.plots=false", *GRPO, *gate.overrides, *overrides)
    environ = os.environ | gate.environment | {"PYTHONPATH": PYTHONPATH}
    with (folder.parent / "errors.txt").open("a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ)
    try:
        for line in process.stdout:
            output += line
            found = re.match(r"step +(\d+)/|resuming after step (\d+)", line)
            if found is not None and found[1] and int(found[1]) in blows:
                victim, number = blows.pop(int(found[1]))
                pids = [process.pid] if victim == "launcher" else processes(folder, victim)
                os.kill(pids[-1], number)
            if found is not None:
                reached = int(found[1] or found[2])
            if reached != awaited[0] or awaited[1] in output:
                gate.passed(reached)
        return process.wait(timeout=600), output
    finally:
        process.kill()


def processes(folder: Path, worker: str) -> list[int]:
    """The processes that a worker has had."""
    log = (folder / "logs" / f"{worker}.log").read_text()
    return [int(one) for one in re.findall(r"^process (\d+) on ", log, re.MULTILINE)]


def terminate_in_step_one(folder: Path, gate: Gate) -> None:
    """Ask the run of this process to end as soon as it has measured anything; its rewards wait until then."""
    while not (folder / "metrics.jsonl").exists() or not listens():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    gate.passed(1)


def beginnings(output: str) -> list[int]:
    """The steps after which a run has gone on."""
    return [int(step) for step in re.findall(r"resuming after step (\d)", output)]


def rollouts_of(folder: Path) -> dict[str, list[dict]]:
    """All samples with their tokens and scores, without the times when they were sampled."""
    return {
        file.name: [{name: value for name, value in row.items() if name != "spans"} for row in rows]
        for file in rollout_files(folder)
        for rows in [read_rollout(file, tokens=True)]
    }


def assert_same_run(folder: Path, other: Path) -> None:
    """All metrics, samples and exported weights agree. Logprobs of an engine agree up to rounding, which depends on the
    other requests of a batch."""
    metrics, wanted = metrics_of(folder), metrics_of(other)
    of_both = [key for key in wanted if "_error" in key[1] or "logprob_abs_diff" in key[1]]
    assert metrics == wanted | {key: pytest.approx(wanted[key], rel=1e-5, abs=1e-6) for key in of_both}
    found, expected = rollouts_of(folder), rollouts_of(other)
    for row in (row for rows in expected.values() for row in rows):
        row["generation_logprobs"] = pytest.approx(row["generation_logprobs"], abs=1e-5)
    assert found == expected
    assert_same_weights(folder / "hf", other / "hf")


def test_a_run_that_is_hit_by_everything_is_the_same_run(tmp_path, model_folder, monkeypatch, capfd):
    alone, folder = tmp_path / "alone", tmp_path / "hit"
    _, metrics = train_here(alone, model_folder, *GRPO)
    assert len([norm for norm in series(metrics, "train/grad_norm") if norm > 0]) == 7
    # The run is asked to end, after a step that the period does not save.
    gate = Gate(folder)
    gate.passed(-1)
    for name, value in gate.environment.items():
        monkeypatch.setenv(name, value)
    Thread(target=terminate_in_step_one, args=(folder, gate), daemon=True).start()
    stopped = run_here(folder, model_folder, "logger.plots=false", *GRPO, *TRACKED, *gate.overrides)
    assert stopped.returncode == 75 and "stopped after step 1 of 7: SIGTERM was received" in stopped.stderr
    assert "SIGTERM: the run ends after this step, with a checkpoint" in capfd.readouterr().err
    # The same command resumes. An engine comes back within the run; after a policy rank has died, the run starts
    # itself again; then the launcher is killed.
    blows = {2: ("generation-0", signal.SIGKILL), 3: ("policy-0", signal.SIGKILL), 5: ("launcher", signal.SIGKILL)}
    status, output = hit(folder, model_folder, blows, *TRACKED)
    assert status == -signal.SIGKILL and beginnings(output) in ([1, 2], [1, 1])
    assert re.search(r"generation rank 0 failed in phase '\w+': the process died", output)
    assert "the engine has restarted" in output
    assert "restarting from the last checkpoint (restart 1 of at most 3 without a new step" in output
    # Only the loss of the engine has started a second process for it.
    assert "the engines keep running" in output and len(processes(folder, "generation-0")) == 2
    saved = int((folder / "checkpoints" / "latest").read_text().rpartition("-")[2])
    gate.passed(99)
    resumed = run_here(folder, model_folder, "logger.plots=false", *GRPO, *TRACKED, *gate.overrides)
    assert resumed.returncode == 0 and beginnings(resumed.stdout) == [saved] and saved in (2, 4), resumed.stderr
    assert_same_run(folder, alone)
    assert len(rollouts_of(folder)) == 7 + 5
    # One W&B run, although several processes have logged to it.
    run_id = (folder / "wandb-run-id.txt").read_text().strip()
    assert {path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")} == {run_id}
    assert [path.name for path in sorted(folder.glob("checkpoints/step-*"))] == ["step-00000006", "step-00000007"]
    # Its newest checkpoint is what the run itself has exported.
    (said,) = run_ranks(Path(export.__file__), [str(folder)], 1)
    assert re.search(r"step 7 -> \S+; transformers' logprobs differ by \d", said)
    assert_same_weights(folder / "hf-step-00000007", folder / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("colocated", ["true", "false"])
def test_engines_outlive_a_policy_rank_and_the_run_is_the_same(tmp_path, model_folder, colocated):
    alone, folder = tmp_path / "alone", tmp_path / "hit"
    ranks = ["cluster.cpu_ranks=2", "policy.train_micro_batch_size=32", "policy.logprob_batch_size=32"]
    apart = [*ranks, "generation.data_parallel_size=2", f"generation.colocated.enabled={colocated}"]
    train(alone, model_folder, *GRPO, *apart)
    status, output = hit(folder, model_folder, {3: ("policy-1", signal.SIGKILL)}, *apart)
    assert status == 0 and beginnings(output) == [2], output[-3000:]
    assert "policy rank 1 failed" in output and "the engines keep running" in output
    for rank in range(2):
        assert len(processes(folder, f"generation-{rank}")) == 1
    assert [len(processes(folder, f"policy-{rank}")) for rank in range(2)] == [1, 2]
    assert_same_run(folder, alone)


def test_a_run_continues_while_a_lost_engine_restarts_and_joins(tmp_path, model_folder):
    """And two policy ranks send windows to those engines that live."""
    folder = tmp_path / "hit"
    apart = ["generation.data_parallel_size=2", "generation.colocated.enabled=false", "generation.min_engines=1"]
    ranks = ["cluster.cpu_ranks=2", "policy.train_micro_batch_size=32", "policy.logprob_batch_size=32"]
    # With small buckets, because a replica that would send less than half of one sends nothing.
    apart += [*ranks, "refit.bucket_bytes=60000"]
    blows, back = {2: ("generation-1", signal.SIGKILL)}, (3, "the engine has restarted")
    status, output = hit(folder, model_folder, blows, *apart, awaited=back)
    assert status == 0 and beginnings(output) == [], output[-3000:]
    assert "generation rank 1 failed" in output and "it restarts now" in output and back[1] in output
    # The lost engine has left the groups, and refits that connect again go through rank 0.
    connections = [(folder / "logs" / f"generation-{rank}.log").read_text().count(": windows") for rank in range(2)]
    assert connections[0] >= 3 and connections[1] >= 2
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    buckets = [line["refit/buckets"] for line in lines if "refit/buckets" in line]
    # On a busy machine the engine joins after other refits, and engines connect more often.
    if connections == [3, 2]:
        assert len({*buckets[1:3], *buckets[-2:]}) == 1 and buckets[0] == buckets[4] != buckets[-1]
    assert len({*buckets}) == 2
    assert len(processes(folder, "generation-0")) == len(processes(folder, "policy-0")) == 1
    # Every prompt is trained once, with all its samples.
    steps = [rows for name, rows in sorted(rollouts_of(folder).items()) if name.endswith("-train.parquet")]
    prompts = [[row["prompt"][0]["content"] for row in rows] for rows in steps]
    assert [len(set(own)) for own in prompts] == [8] * 7 and len({one for own in prompts for one in own}) == 7 * 8
    assert all(count == 8 for own in prompts for count in Counter(own).values())
