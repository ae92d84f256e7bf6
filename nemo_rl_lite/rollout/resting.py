"""Prompts that taught nothing are left out for some epochs."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from nemo_rl_lite.data.problems import Problem


class Resting:
    """Remembers which prompts taught nothing when they were last sampled.

    Such a prompt rests for two epochs, the next time for four, then eight, ... up to `most`; one that teaches something
    is forgotten. A prompt is known by its text, so the rows of a file may be moved.
    """

    def __init__(self, most: int, epoch_length: int, state: Mapping[str, Any] | None = None, position: int = 0):
        """`most`: 0 where no prompt rests. `epoch_length`: prompts of an epoch, 0 where the data has no end. `state`:
        what `state()` of an earlier run returned, at this position of its data, which may have had other rows."""
        self._most, self._epoch_length = most, epoch_length
        # The first epoch in which a prompt is sampled again, and for how many it rests.
        self._rests: dict[str, tuple[int, int]] = {}
        if state and most and epoch_length:
            shift = position // epoch_length - position // state["epoch_length"]
            latest = position // epoch_length + 1 + most
            for name, (until, rest) in state["rests"].items():
                self._rests[name] = (min(until + shift, latest), min(rest, most))

    def is_left_out(self, problem: Problem, position: int) -> bool:
        """Whether the prompt at this position of the data rests."""
        until, _ = self._rests.get(_name(problem), (0, 0)) if self._rests else (0, 0)
        return bool(until) and position // self._epoch_length < until

    def note(self, problem: Problem, position: int, taught: bool) -> None:
        """The prompt at this position has been sampled."""
        if not self._most or not self._epoch_length:
            return
        name = _name(problem)
        _, rested = self._rests.pop(name, (0, 0))
        if not taught:
            rest = min(2 * max(rested, 1), self._most)
            self._rests[name] = (position // self._epoch_length + 1 + rest, rest)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; nothing where no prompt rests."""
        if not self._rests:
            return {}
        return {"epoch_length": self._epoch_length, "rests": {name: list(own) for name, own in self._rests.items()}}


def _name(problem: Problem) -> str:
    asked = json.dumps([problem.messages, problem.answer], default=str)
    return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()
