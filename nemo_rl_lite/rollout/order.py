"""Which prompts of the training set are sampled next."""

from bisect import insort
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.rollout.resting import Resting


class PromptOrder:
    """Hands out each position of the training set once, in the order of the data. Prompts that rest are passed over.
    Rollouts give back the positions that they did not need; those come next."""

    def __init__(self, training: TrainingSet[Problem], resting: Resting, state: Mapping[str, Any]):
        """`state`: what `state()` of an earlier run returned; its resting prompts are in `resting` already."""
        self._training, self._resting = training, resting
        self._next: int = state["position"]
        self._returned = sorted(state.get("returned", ()))

    def draw(self) -> list[int]:
        """Return the next position whose prompt does not rest, after those that are passed over on the way to it."""
        drawn = []
        while True:
            position = self._returned.pop(0) if self._returned else self._next
            self._next = max(self._next, position + 1)
            drawn.append(position)
            if not self._resting.is_left_out(self._training.problem(position), position):
                return drawn

    def problem(self, position: int) -> Problem:
        return self._training.problem(position)

    def note(self, position: int, taught: bool) -> None:
        """Training consumes the prompt at this position; `taught`: whether its rewards differed."""
        self._resting.note(self.problem(position), position, taught)

    def give_back(self, positions: Iterable[int]) -> None:
        """Nothing was sampled of these, or it is not used, or they were passed over on the way to such a prompt."""
        for position in positions:
            insort(self._returned, position)
        while self._returned and self._returned[-1] == self._next - 1:
            self._next = self._returned.pop()

    def state(self) -> dict[str, Any]:
        """What a checkpoint saves, for the run that resumes from it."""
        returned = {"returned": list(self._returned)} if self._returned else {}
        return {"position": self._next, **returned, "resting": self._resting.state()}
