"""A few samples of each rollout, for people to read."""

import json
from pathlib import Path

from nemo_rl_lite.observability.history import rewind
from nemo_rl_lite.rollout.rollout import Rollout


class SampleLog:
    """Appends the first `count` samples of each rollout to samples.jsonl in the run's folder, after those of the `done`
    steps that were taken before."""

    def __init__(self, run_folder: Path, count: int, done: int):
        self._path, self._count = run_folder / "samples.jsonl", count
        rewind(self._path, done)

    def __call__(self, step: int, rollout: Rollout) -> None:
        if not self._count:
            return
        with self._path.open("a", encoding="utf-8") as file:
            for index in range(min(self._count, len(rollout.responses))):
                completion = rollout.completions[index]
                entry = {
                    "step": step,
                    "prompt": rollout.problems[index].messages,
                    "answer": rollout.problems[index].answer,
                    "response": rollout.responses[index],
                    "reward": rollout.rewards_B[index].item(),
                    "tokens": len(completion.tokens),
                    "finish_reason": completion.finish_reason,
                }
                if len(rollout.turns[index]) > 1:
                    entry["turns"] = tuple(rollout.turns[index])
                file.write(json.dumps(entry) + "\n")
