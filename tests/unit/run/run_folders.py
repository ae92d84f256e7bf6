"""Run folders as runs leave them, for their reports."""

import dataclasses
import json
from functools import cache
from pathlib import Path

from nemo_rl_lite.observability.metrics_log import METRICS_FILE
from nemo_rl_lite.rollout.files import RolloutFiles
from nemo_rl_lite.rules.compose import compose_config
from nemo_rl_lite.run.folder import status_kept, write_start
from tests.unit.observability.rollouts import make_rollout

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
            entry |= {"timing/train/total_step_time": 1.5, "train/reward": value, "train/kl_penalty": value / 10}
            entry |= {"memory/measured/train/parameters": 2**30, "memory/predicted/train/parameters": 2**30}
            entry |= {"refit/seconds": 0.1, "refit/load_s": 0.05, "refit/gb_per_s": 2.0, "ray/node.0.cpu_util": 50.0}
            file.write(json.dumps(entry) + "\n")
            if config.algorithm.name == "grpo":
                rollouts.write(step, "train", make_rollout([HOSTILE, "plain"], [0.0, 1.0]))
        file.write(json.dumps({"step": 0, "time": 1000.0, "validation/accuracy": 0.25}) + "\n")
    return folder
