"""User functions that a run calls between steps, and the request to end it after the current step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_lite.errors import CallbackError
from nemo_rl_lite.system.user_errors import as_call_error, place_of

STOP = "stop"
"""Return value of `on_step` that ends the run, as True does."""

Metrics = Mapping[str, float]
OnStep = Callable[[dict[str, float]], Any]
"""Gets all metrics of a step under their full names, and `step`."""
OnRollout = Callable[[int, list[dict[str, Any]]], Any]
"""Gets a step and the samples of its rollout, as rows of `rollouts/`."""


@dataclass
class Callbacks:
    """Functions that run in the launcher between steps. An error in one ends the run."""

    on_step: OnStep | None = None
    on_rollout: OnRollout | None = None
    stopped: bool = field(default=False, init=False)
    """True if the run should end after its current step, as a complete run."""

    def stop(self) -> None:
        """Ask the run to end after its current step. Any thread may call this."""
        self.stopped = True

    def step_done(self, step: int, history: Sequence[Metrics]) -> bool:
        """Report a step; return True if the run should end. `history`: entries of the metrics log, in order. Raises
        CallbackError: `on_step` raised."""
        if self.on_step is not None:
            metrics = {"step": float(step)}
            for entry in reversed(history):
                if entry["step"] != step:
                    break
                metrics = {**entry, **metrics}
            answer = _called("on_step", self.on_step, metrics)
            # Other truthy values, such as that of a last expression, do not count.
            if answer is True or answer == STOP:
                self.stop()
        return self.stopped

    def rollout_done(self, step: int, rows: Callable[[], Sequence[dict[str, Any]]]) -> None:
        """Report a rollout. `rows` creates its rows on demand. Raises CallbackError: `on_rollout` raised."""
        if self.on_rollout is not None:
            _called("on_rollout", self.on_rollout, step, list(rows()))


def _called(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # a user's function may raise anything
        raise CallbackError(f"{name} raised {as_call_error(error)}{place_of(error)}; the run has ended") from error
