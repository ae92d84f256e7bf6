"""The switch that pauses drafts where an engine decodes faster without them."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nemo_rl_lite.compat.vllm import DraftSchedule
from nemo_rl_lite.generation.interface import Drafts

log = logging.getLogger(__name__)

# Steps with drafts that are compared with as many without, in turns of this many steps.
WINDOW, TURN = 32, 8
# Steps after a change that are not counted: some of them were scheduled before it.
SETTLE = 2
# Steps at a load until it is measured again.
REST = 1000


@dataclass(frozen=True)
class DecodeStep:
    """One decode step: its duration, the requests that it advanced, and their new tokens."""

    seconds: float
    requests: int
    tokens: int


class _Load:
    """Measurements and decision for numbers of running requests that differ by less than a factor of 2."""

    def __init__(self) -> None:
        self.stays, self.rests = True, 0
        self._steps: dict[bool, list[DecodeStep]] = {True: [], False: []}

    @property
    def wanted(self) -> bool:
        """State of the next step: True for drafts."""
        if self.rests:
            return self.stays
        own, other = (len(self._steps[state]) // TURN for state in (self.stays, not self.stays))
        return self.stays if own <= other else not self.stays

    def add(self, step: DecodeStep, drafts: bool) -> float | None:
        """Count a step; return the gain once both states were measured."""
        self._steps[drafts].append(step)
        if any(len(steps) < WINDOW for steps in self._steps.values()):
            return None
        gain = _rate(self._steps[True]) / _rate(self._steps[False])
        self._steps, self.rests = {True: [], False: []}, REST
        return gain


def _rate(steps: Sequence[DecodeStep]) -> float:
    """Return tokens per request and second."""
    # A step that waits for something else would distort a mean of the durations.
    seconds = median(step.seconds for step in steps)
    return sum(step.tokens for step in steps) / sum(step.requests for step in steps) / seconds


class DraftSwitch:
    """Decides after each decode step whether the next ones have drafts.

    The gain is the tokens per second with drafts, divided by those without. Below 1, drafts pause. Each load, a range
    of numbers of running requests, has its own decision. It is measured again after `REST` steps at this load.
    """

    def __init__(self) -> None:
        self.drafts = True
        self._loads: defaultdict[int, _Load] = defaultdict(_Load)
        self._settles = SETTLE

    def observe(self, step: DecodeStep) -> float | None:
        """Count a step, which may change `drafts`. Return the gain if this step completed a measurement."""
        gain, load = None, self._loads[step.requests.bit_length()]
        if self._settles:
            self._settles -= 1
        elif load.rests:
            load.rests -= 1
        else:
            gain = load.add(step, self.drafts)
        if gain is not None and load.stays != (gain >= 1):
            load.stays = gain >= 1
            does = "resume" if load.stays else "pause"
            text = "drafts %s: %.2f times the tokens per second without them (running requests: about %d)"
            log.info(text, does, gain, step.requests)
        if load.wanted != self.drafts:
            self.drafts, self._settles = load.wanted, SETTLE
        return gain


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
