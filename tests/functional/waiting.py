"""Environments that wait. Their processes import this module, and nothing else that takes long."""

import time
from pathlib import Path

from nemo_rl_lite.environments.interface import Observation


class Waits:
    """Ends after three responses, with a reward of 1. Problems whose answer is at least `first` wait after two, until a
    file exists."""

    def __init__(self, file: str, first: int):
        self._file, self._first, self._turns = Path(file), first, 0

    def step(self, problem, conversation):
        while self._turns == 1 and int(problem.answer) >= self._first and not self._file.exists():
            time.sleep(0.05)
        self._turns += 1
        if self._turns == 3:
            return Observation(done=True, reward=1.0)
        return Observation(({"role": "user", "content": "1"},))

    def state(self):
        return {"turns": self._turns}

    def restore(self, state):
        self._turns = state["turns"]


class Hangs:
    def step(self, problem, conversation):
        time.sleep(600)
