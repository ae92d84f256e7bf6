"""Run folders as runs leave them, for their reports."""

import dataclasses
import json
from functools import cache
from pathlib import Path

from nemo_rl_lite.observability.console import ENGINES_IDLE
from nemo_rl_lite.observability.environment import STATUS_FILE
from nemo_rl_lite.observability.timer import Phase
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.rollout.episode import Span
from nemo_rl_lite.rollout.store import RolloutFiles
from nemo_rl_lite.run.folder import status_kept, write_start
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.observability.rollouts import make_rollout

REFIT = "prepare_for_generation/transfer_and_update_weights"
# What a model may write, and what must stay text.
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"><!-- é 漢 \u2028"
)

composed = cache(lambda *overrides: compose_config(overrides))


def make_run(folder: Path, *overrides: str, steps: int = 6, slope: float = 0.1) -> Path:
    """A GRPO run, or that of another algorithm by its override, without having run it."""
    folder.mkdir(parents=True)
    config = composed(*overrides)
    write_start(folder, dataclasses.asdict(config), f"python -m nemo_rl_lite.train {' '.join(overrides)}")
    rollouts = RolloutFiles(folder, None, done=0)
    with status_kept(folder, saves=True), (folder / METRICS_FILE).open("a") as file:
        for step in range(1, steps + 1):
            value = slope * step
            entry = {"step": step, "time": 1000.0 + 60 * step, "train/loss": 1 / step, "train/grad_norm": None}
            entry |= {f"timing/train/{name}": 0.5 for name in ("policy_training", "generation")}
            entry |= {"performance/train_flops_per_gpu": 400.0, "performance/train_fp_utilization": 0.4}
            entry |= {"timing/train/total_step_time": 1.5, "train/reward": value, "train/kl_penalty": value / 10}
            entry |= {"train/mean_gen_tokens_per_sample": 10.0 + step, "train/entropy": 1 / step}
            entry |= {
                "train/truncation_rate": 0.5,
                "train/baseline_reward/pct_mixed": 0.25,
                "train/clip_ratio/low": 0.01,
            }
            entry |= {"memory/measured/train/parameters": 2**30, "memory/predicted/train/parameters": 2**30}
            entry |= {"refit/seconds": 0.1, "refit/load_s": 0.05, "refit/gb_per_s": 2.0, "ray/node.0.cpu_util": 50.0}
            file.write(json.dumps(entry) + "\n")
            if config.algorithm.name == "grpo":
                rollouts.write(step, "train", make_rollout([HOSTILE, "plain"], [0.0, 1.0]))
        file.write(json.dumps({"step": 0, "time": 1000.0, "validation/accuracy": 0.25}) + "\n")
    return folder


def make_asynchronous_run(folder: Path, steps: int = 3, state: str = "done") -> Path:
    """A run whose engines generate the rollout of a step while the policy trains on the one before. A step takes 10 s:
    the policy waits for 1 s, trains for 7 s and refits for 2 s. From the second step on, engines begin the step's
    rollout 9.5 s before the step does, and work on it for 4 s. They stop within the first half second of a refit.
    """
    folder.mkdir(parents=True)
    loss = "algorithm.loss_fn"
    correction = f"{loss}.use_importance_sampling_correction=true", f"{loss}.truncated_importance_sampling_ratio=2"
    config = composed("algorithm.rollouts.source=one_step_off", *correction)
    write_start(folder, dataclasses.asdict(config), "python -m nemo_rl_lite.train")
    (folder / STATUS_FILE).write_text(json.dumps({"state": state}))
    rollouts = RolloutFiles(folder, None, done=0)
    with (folder / METRICS_FILE).open("a") as file:
        for step in range(1, steps + 1):
            began, age = 10.0 * (step - 1), min(step - 1, 1)
            entry = {"step": step, "time": 1000.0 + 10 * step, "refit/seconds": 1.0, "refit/paused_s": 1.5}
            entry |= {"timing/train/total_step_time": 10.0, "timing/train/generation": 1.0, ENGINES_IDLE: 5.5}
            entry |= {"train/trajectory_age_mean": float(age), f"train/age_{age}/tokens_share": 1.0}
            entry |= {f"train/age_{age}/gen_kl_error": 0.01 * age, "train/correction/ess": 0.9}
            file.write(json.dumps(entry) + "\n")
            rollout = make_rollout(["a", "b"], [0.0, 1.0])
            for place, episode in enumerate(rollout.episodes):
                episode.spans = [Span("generate", began - 9.5, began - 5.5, place), Span("reward", began - 5.5, began)]
            parts = [("generation", 0, 1), ("policy_training", 1, 8), (REFIT, 8, 10), ("total_step_time", 0, 10)]
            phases = [Phase(name, began + begin, began + end) for name, begin, end in parts]
            rollouts.write(step, "train", rollout, phases)
    return folder
