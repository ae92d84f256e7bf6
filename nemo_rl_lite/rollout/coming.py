"""The rollouts of coming steps, in the thread of the engines: when they begin, and what a checkpoint has of them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from nemo_rl_lite.errors import EngineError, WorkerError
from nemo_rl_lite.generation.interface import Requests
from nemo_rl_lite.rollout.background import LOOK_S
from nemo_rl_lite.rollout.collector import Gathering
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.sampler import Draft, Sampler
from nemo_rl_lite.rollout.saved import SavedRollout

log = logging.getLogger(__name__)


class Steering(Protocol):
    """The queue of requests, as it is steered here."""

    async def pause(self) -> None: ...

    def resume(self) -> None: ...

    @property
    def has_engines(self) -> bool: ...


@dataclass(frozen=True)
class Staleness:
    """How old a rollout may be."""

    max_age: int
    """The most steps of the run, one rollout each, between the weights that sample a token and those with which the
    step that trains on it begins (NeMo-RL's `max_trajectory_age_steps`)."""
    in_flight: bool
    """Whether responses continue with new weights. Otherwise rollouts are sampled one at a time, each by the weights of
    one version."""


@dataclass(eq=False)
class _Begun:
    """The rollout of a coming step: under way, or complete."""

    draft: Draft
    gathering: Gathering | None
    rollout: asyncio.Future[Rollout]

    @property
    def is_under_way(self) -> bool:
        return not self.rollout.done()


class ComingRollouts:
    """Begins the rollout of a step as soon as its weights are new enough. At most `max_age + 1` rollouts exist,
    whatever happens. The coroutines run in the thread of the engines; the main thread looks at `gatherings`."""

    def __init__(
        self,
        sampler: Sampler,
        queue: Steering,
        staleness: Staleness,
        done: int,
        steps: int,
        saved: Sequence[SavedRollout],
    ):
        """See `ahead.Queue`."""
        self._sampler, self._queue, self._staleness, self._steps = sampler, queue, staleness, steps
        self._saved = self._young_enough(saved)
        self._next, self.version = done + 1, done
        self.requests: Requests | None = None
        """What the engines serve, once they have weights."""
        # By step, and whether no other may begin.
        self._begun: dict[int, _Begun] = {}
        self._is_held = False

    async def take(self, step: int) -> Rollout:
        """Wait for the rollout of a step."""
        if step not in self._begun:
            raise RuntimeError(f"no rollout of step {step} was begun; there are those of {sorted(self._begun)}")
        await asyncio.wait([self._begun[step].rollout])
        return self._begun.pop(step).rollout.result()

    async def settle(self) -> None:
        """Let no rollout begin until `release`, and wait for those under way."""
        self._is_held = True
        while (running := self._under_way()) and self._queue.has_engines:
            await asyncio.wait([one.rollout for one in running], timeout=LOOK_S)
        self._raise_failed()

    async def pause(self) -> None:
        """Let the engines stop, for new weights."""
        try:
            await self._queue.pause()
        except (EngineError, WorkerError):
            # The same error, with the step: it reaches all rollouts under way.
            await asyncio.gather(*(one.rollout for one in self._under_way()), return_exceptions=True)
            self._raise_failed()
            raise
        self._raise_failed()

    async def resume(self, version: int) -> None:
        """Let the engines go on with the weights that this step made."""
        self.version = version
        self._queue.resume()
        await self.release()

    async def release(self) -> None:
        """Let rollouts begin again."""
        self._is_held = False
        self._begin()

    async def gather(self, gathering: Gathering, step: int) -> Rollout:
        """Sample something else, such as a validation, which belongs to a step."""
        if self.requests is None:
            raise RuntimeError("the engines have no weights yet")
        return await self._sampler.gather(gathering, step, self.requests)

    async def snapshot(self) -> tuple[dict[str, Any], list[SavedRollout]]:
        """Return the place in the data, and the rollouts that come next."""
        self._raise_failed()
        found = []
        for step, one in sorted(self._begun.items()):
            groups = [] if one.gathering is None else one.gathering.groups
            done = {number: group.episodes for number, group in enumerate(groups) if group.is_done}
            rollout = None if one.is_under_way else one.rollout.result()
            found.append(SavedRollout(step, list(one.draft.draws), rollout, done))
        return self._sampler.order.state(), [*found, *self._saved.values()]

    def gatherings(self) -> list[Gathering]:
        """Those of the rollouts under way."""
        return [one.gathering for one in self._under_way() if one.gathering is not None]

    def _begin(self) -> None:
        """Begin the rollouts whose weights are new enough."""
        while self._next <= self._steps and self._next - 1 - self.version <= self._staleness.max_age:
            if self._is_held or (self._under_way() and not self._staleness.in_flight):
                return
            step, self._next = self._next, self._next + 1
            saved = self._saved.pop(step, None)
            if saved is not None and saved.rollout is not None:
                ready = asyncio.get_running_loop().create_future()
                ready.set_result(saved.rollout)
                self._begun[step] = _Begun(Draft(step, saved.draws), None, ready)
                continue
            draft = Draft(step) if saved is None else Draft(step, saved.draws)
            gathering = self._sampler.gathering(draft, saved.done if saved else None)
            task = asyncio.ensure_future(self._sample(draft, gathering))
            self._begun[step] = _Begun(draft, gathering, task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Rollout]) -> None:
        # An error is raised when the main thread looks.
        if not task.cancelled() and task.exception() is None:
            self._begin()

    async def _sample(self, draft: Draft, gathering: Gathering) -> Rollout:
        return self._sampler.finish(draft, await self.gather(gathering, draft.step))

    def _young_enough(self, saved: Sequence[SavedRollout]) -> dict[int, SavedRollout]:
        """Return those by step that are not too old for this run, and give back the prompts of the others."""
        kept = {}
        for one in saved:
            age = one.step - 1 - one.oldest
            if age <= self._staleness.max_age:
                kept[one.step] = one
                continue
            log.warning("the rollout of step %d in the checkpoint is %d steps old: it is sampled again", one.step, age)
            self._sampler.order.give_back(chain.from_iterable(one.draws))
        return kept

    def _under_way(self) -> list[_Begun]:
        return [one for one in list(self._begun.values()) if one.is_under_way]

    def _raise_failed(self) -> None:
        for one in self._begun.values():
            if one.rollout.done():
                one.rollout.result()
