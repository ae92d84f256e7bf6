"""A run that is stopped in the middle of episodes continues them, in any process."""

import json
import os
import signal
from contextlib import suppress

import psutil
import pytest

from nemo_rl_lite.models.embedded import TOKENS
from nemo_rl_lite.rollout.saved import load_rollouts
from tests.functional.conftest import run_command, train
from tests.functional.test_failures import Run

pytestmark = [pytest.mark.functional, pytest.mark.slow]

QUEUE = [
    *("algorithm.rollouts.source=queue", "algorithm.rollouts.max_trajectory_age_steps=1"),
    *("generation.data_parallel_size=2", "generation.colocated.enabled=false"),
    # A response is one token, so that the untrained model truncates none.
    *(f"generation.stop_token_ids={list(range(len(TOKENS)))}", "policy.max_total_sequence_length=64"),
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
    *("algorithm.max_num_steps=4", "algorithm.num_prompts_per_step=2", "algorithm.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=8", "policy.train_micro_batch_size=8", "policy.logprob_batch_size=8"),
    *("algorithm.val_period=0", "algorithm.val_at_start=false", "algorithm.val_at_end=false"),
    *("checkpoint.save_period=9", "logger.plots=false", "data=file", "data.shuffle=false"),
    *("environment.name=tests.functional.waiting.Waits", "environment.max_turns=3", "environment.timeout_s=600"),
    *("+environment.kwargs.first=4", "environment.concurrency=64"),
]


def test_unfinished_episodes_of_two_rollout_workers_continue_in_the_launcher(tmp_path, model_folder):
    """Without the states of their environments, they would not end after three turns."""
    rows, opened, folder = tmp_path / "rows.jsonl", tmp_path / "opened", tmp_path / "run"
    rows.write_text("".join(json.dumps({"prompt": f"{row}", "answer": f"{row}"}) + "\n" for row in range(8)))
    own = [*QUEUE, f"data.train_path={rows}", f"data.validation_path={rows}", f"+environment.kwargs.file={opened}"]
    run = Run(folder, run_command(folder, model_folder, *own, "algorithm.rollouts.num_workers=2"))
    try:
        run.wait_for(r"^step +1/4")
        os.kill(run.process.pid, signal.SIGTERM)
        errors = run.end()
    finally:
        for process in run.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert run.process.returncode == 75, errors[-3000:]
    stopped = int(errors.partition("stopped after step ")[2].partition(" ")[0])
    groups = [
        group
        for saved in load_rollouts(folder / "checkpoints" / f"step-{stopped:08d}")
        for group in saved.groups.values()
    ]
    begun = [episode for group in groups if group.is_begun for episode in group.read()]
    assert begun and {(len(one.turns), one.stage) for one in begun} == {(2, "play")}
    assert {one.state for one in begun} == {'{"turns": 1}'}
    opened.touch()
    _, metrics = train(folder, model_folder, *own, "algorithm.rollouts.num_workers=0")
    steps = [line for line in metrics if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["train/reward"] == 1 and line["train/avg_turns_per_sample"] == 3 for line in steps)
    assert sum(line.get("rollout/taken_over_tokens", 0) for line in steps) == sum(one.generated for one in begun)
