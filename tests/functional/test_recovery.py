"""Whatever a run is hit by, it ends with the same weights and metrics as one that was left alone."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.conftest import PYTHONPATH, train
from tests.functional.test_dpo import SMALL as DPO
from tests.functional.test_dpo import write_pairs
from tests.functional.test_sft import SMALL as SFT
from tests.functional.test_sft import write_data

pytestmark = pytest.mark.functional

GRPO = [
    "algorithm.max_num_steps=7",
    "algorithm.num_prompts_per_step=8",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=64",
    "policy.logprob_batch_size=64",
    "algorithm.max_val_samples=20",
    "algorithm.val_period=2",
    "checkpoint.save_period=2",
    "logger.wandb_enabled=true",
    "logger.wandb.mode=offline",
    "logger.plots=false",
]


def hit(folder: Path, model: Path, step: int, victim: str, number: signal.Signals) -> tuple[int, str]:
    """Run the command and send a signal to one of its processes after a step; exit status and standard output."""
    command = [sys.executable, "-m", "nemo_rl_lite.train", f"hydra.run.dir={folder}", f"policy.model_name={model}"]
    environ = os.environ | {"PYTHONPATH": PYTHONPATH}
    with (folder.parent / "errors.txt").open("a") as errors:
        process = subprocess.Popen([*command, *GRPO], stdout=subprocess.PIPE, stderr=errors, text=True, env=environ)
    output = ""
    for line in process.stdout:
        output += line
        if re.match(f"step +{step}/7", line):
            log = folder / "logs" / f"{victim}.log"
            found = re.findall(r"process (\d+)", log.read_text()) if victim != "launcher" else [process.pid]
            os.kill(int(found[-1]), number)
    return process.wait(timeout=60), output


def metrics_of(folder: Path) -> dict[tuple[int, str], float]:
    """What training and validation measured, by step and name."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kinds = ("train/", "validation/")
    return {(line["step"], name): line[name] for line in lines for name in line if name.startswith(kinds)}


def assert_same(one: Path, other: Path) -> None:
    assert metrics_of(one) == metrics_of(other)
    first, second = (load_file(folder / "hf" / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_grpo_run_is_hit_by_everything(tmp_path, model_folder):
    alone, folder = tmp_path / "alone", tmp_path / "hit"
    train(alone, model_folder, *GRPO)
    # An engine, in the step after: it comes back within the run.
    status, output = hit(folder, model_folder, 1, "generation-0", signal.SIGKILL)
    assert status == 0 and re.search(r"generation rank 0 failed in phase '\w+': the process died", output)
    assert "it is back after" in output and "going on" not in output
    assert_same(folder, alone)

    folder = tmp_path / "hit again"
    status, _ = hit(folder, model_folder, 3, "launcher", signal.SIGKILL)
    assert status == -signal.SIGKILL
    # The same command goes on; this time a policy rank dies, and the run starts itself again.
    status, output = hit(folder, model_folder, 5, "policy-0", signal.SIGKILL)
    assert status == 0 and "going on after step 2" in output and "going on after step 4" in output
    assert "starting again from the last checkpoint (restart 1 of at most 3, cluster.max_restarts)" in output
    assert_same(folder, alone)
    # One W&B run, although three processes have logged to it.
    run_id = (folder / "wandb-run-id.txt").read_text().strip()
    assert {path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")} == {run_id}


def test_a_preempted_run_goes_on(tmp_path, model_folder):
    folder = tmp_path / "run"
    status, output = hit(folder, model_folder, 1, "launcher", signal.SIGTERM)
    assert status == 75 and "SIGTERM: the run ends after this step, with a checkpoint" in output
    assert "stopped after step 2 of 7: SIGTERM was received" in (tmp_path / "errors.txt").read_text()
    output, _ = train(folder, model_folder, *GRPO, "algorithm.max_num_steps=3")
    assert "going on after step 2" in output and "algorithm.max_num_steps: 7 -> 3" in output
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000002", "step-00000003"]

    # Its newest checkpoint is what the run itself has exported.
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_lite.export", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 3 -> \S+; transformers' logprobs differ by \d", done.stdout)
    own, expected = (load_file(folder / name / "model.safetensors") for name in ("hf-step-00000003", "hf"))
    assert all(torch.equal(own[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("options", "write"), [(SFT, write_data), (DPO, write_pairs)], ids=["sft", "dpo"])
def test_half_and_half_is_the_whole(tmp_path, model_folder, options, write):
    """Stopped in the middle of an epoch, at a step that the period does not save."""
    common = [*options, *write(tmp_path), "algorithm.val_period=2", "checkpoint.save_period=5"]
    train(tmp_path / "whole", model_folder, *common, "algorithm.max_num_steps=6")
    train(tmp_path / "halves", model_folder, *common, "algorithm.max_num_steps=3")
    output, _ = train(tmp_path / "halves", model_folder, *common, "algorithm.max_num_steps=6")
    assert "going on after step 3" in output
    halves, whole = metrics_of(tmp_path / "halves"), metrics_of(tmp_path / "whole")
    # Only the first half validates after its last step.
    only = {key for key in halves if key not in whole}
    assert {step for step, _ in only} == {3} and whole == {k: v for k, v in halves.items() if k not in only}
    first, second = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("halves", "whole"))
    assert all(torch.equal(first[name], second[name]) for name in second)
