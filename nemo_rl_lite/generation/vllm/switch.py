"""The switch that pauses drafts where an engine decodes faster without them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nemo_rl_lite.compat.vllm import DraftSchedule
from nemo_rl_lite.generation.interface import Drafts

log = logging.getLogger(__name__)

# Steps that are compared, with drafts and without.
WINDOW = 32
# Steps after a change that are not counted: some of them were scheduled before it.
SETTLE = 4
# Steps until the next comparison if the load stays.
REST = 1000
# Factor of the number of running requests that is another load.
OTHER_LOAD = 2.0


@dataclass(frozen=True)
class DecodeStep:
    """One decode step: its duration, the requests that it advanced, and their new tokens."""

    seconds: float
    requests: int
    tokens: int


@dataclass(frozen=True)
class _Window:
    """Tokens per request and second, and the mean number of running requests."""

    rate: float
    load: float

    @classmethod
    def of(cls, steps: Sequence[DecodeStep]) -> "_Window":
        requests = sum(step.requests for step in steps)
        # A step that waits for something else would distort a mean.
        seconds = median(step.seconds for step in steps)
        return cls(sum(step.tokens for step in steps) / requests / seconds, requests / len(steps))


class DraftSwitch:
    """Decides after each decode step whether the next ones have drafts.

    It measures a window of steps in the present state, then one in the other. The gain is the tokens per second with
    drafts, divided by those without. Below 1, drafts pause. It measures again once the number of running requests has
    halved or doubled, and after `REST` steps.
    """

    def __init__(self) -> None:
        self.drafts = True
        self._stays = True
        self._steps: list[DecodeStep] = []
        self._first: _Window | None = None
        self._settles, self._rests, self._load = SETTLE, 0, 0.0

    def observe(self, step: DecodeStep) -> float | None:
        """Count a step, which may change `drafts`. Return the gain if this step completed a measurement."""
        self._rests = 0 if _differ(step.requests, self._load) else self._rests
        if self._rests or self._settles:
            self._rests, self._settles = max(self._rests - 1, 0), max(self._settles - 1, 0)
            return None
        self._steps.append(step)
        if len(self._steps) < WINDOW:
            return None
        window, self._steps = _Window.of(self._steps), []
        first, self._first = self._first, None
        if first is None:
            self._first = window
            self._set(not self.drafts)
            return None
        if _differ(window.load, first.load):
            # The load has changed meanwhile: begin again.
            self._set(self._stays)
            return None
        gain = window.rate / first.rate if self.drafts else first.rate / window.rate
        self._decide(gain, window.load)
        return gain

    def _decide(self, gain: float, load: float) -> None:
        stays, self._stays, self._load, self._rests = self._stays, gain >= 1, load, REST
        self._set(self._stays)
        if self._stays != stays:
            does = "resume" if self._stays else "pause"
            log.info("drafts %s: %.2f times the tokens per second without them, at %.0f requests", does, gain, load)

    def _set(self, drafts: bool) -> None:
        if drafts != self.drafts:
            self.drafts, self._settles = drafts, SETTLE


class Drafting:
    """Counts an engine's drafts, and pauses them as `DraftSwitch` decides."""

    def __init__(self, engine: Any, has_model: bool, pauses: bool):
        """`engine`: vLLM's `LLMEngine`. `has_model`: its worker processes have a `DraftExtension`. `pauses`: drafts may
        pause."""
        self._engine, self._has_model, self._pauses = engine, has_model, pauses
        self._schedule, self._switch = DraftSchedule(engine), DraftSwitch()

    def count(self, step: DecodeStep, decodes: bool, statistics: Any) -> Drafts:
        """Return the drafts of a step, given vLLM's `SchedulerStats`. `decodes`: no prompt was prefilled."""
        had, gain = self._switch.drafts, None
        if self._pauses and decodes and step.requests:
            gain = self._switch.observe(step)
        if self._switch.drafts != had:
            self._schedule.allow(self._switch.drafts)
            if self._has_model:
                self._engine.collective_rpc("shorten_drafts", args=(had,))
        found = None if statistics is None else statistics.spec_decoding_stats
        counts = (0, 0, 0)
        if found is not None:
            counts = (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens)
        steps = int(bool(step.requests))
        return Drafts(*counts, steps, steps * (not had), int(gain is not None), gain or 0.0)


def _differ(load: float, other: float) -> bool:
    return max(load, other) >= OTHER_LOAD * min(load, other)
