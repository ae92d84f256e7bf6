"""Which prompts a step samples, and its rollout from the engines' present weights."""

import hashlib
import json
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Completion, Request, Requests, Sampling
from nemo_rl_lite.losses.advantages import overlong_penalty
from nemo_rl_lite.rollout.collector import GroupSelection, RolloutCollector, RolloutTask, Show
from nemo_rl_lite.rollout.episode import Episode, Rollout


class PromptCooldown:
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


class PromptOrder:
    """Hands out each position of the training set once, in the order of the data. Prompts that rest are passed over.
    Rollouts give back the positions that they did not need; those come next."""

    def __init__(self, training: TrainingSet[Problem], resting: PromptCooldown, state: Mapping[str, Any]):
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


@dataclass(eq=False)
class PendingRollout:
    """The rollout of a step, from its first prompt on."""

    step: int
    draws: list[list[int]] = field(default_factory=list)
    """The positions of its prompts in the training set, by number, each after those that were passed over on the way
    to it; see `PromptOrder.draw`."""


@dataclass(frozen=True)
class _PrioritizedRequests:
    """`Requests` of a rollout, which begin before those of later steps that wait already."""

    requests: Requests
    step: int

    async def sample(self, request: Request, near: int | None = None) -> tuple[Completion, int]:
        return await self.requests.sample(replace(request, step=self.step), near)

    def together(self) -> AbstractContextManager[None]:
        return self.requests.together()


@dataclass
class Sampler:
    """Samples prompts with the engines' present weights. A rollout depends on these, the run, the step and `order`
    alone, so a repeated step is the same step."""

    config: GRPOConfig
    collector: RolloutCollector
    sampling: Sampling
    validation: Sequence[Problem]
    order: PromptOrder
    _useful_share: float = field(default=1.0, init=False)
    """The share of useful prompts in the newest rollout: it decides how many of the next one begin at once."""

    def rollout(self, step: int, show: Show = lambda _: None) -> Rollout:
        """Sample the rollout of a step; see `RolloutCollector.collect` for `show`."""
        draft = PendingRollout(step)
        with _naming(step):
            return self.finish(draft, self.collector.collect(self.task(draft), show))

    def held_out(self, step: int, show: Show = lambda _: None) -> Rollout:
        """`val_samples_per_problem` responses to each held-out problem, at `val_temperature`."""
        with _naming(step):
            return self.collector.collect(self.held_out_task(step), show)

    async def gather(self, task: RolloutTask, step: int, requests: Requests) -> Rollout:
        """Sample what belongs to a step while the engines serve, perhaps several steps at a time."""
        with _naming(step):
            return await self.collector.gather(task, _PrioritizedRequests(requests, step))

    def task(self, draft: PendingRollout, done: Mapping[int, list[Episode]] | None = None) -> RolloutTask:
        """Return the rollout to sample. `done`: the episodes of its prompts, by number, that an earlier run has
        finished."""
        options = self.config

        def problem(number: int) -> Problem:
            while len(draft.draws) <= number:
                draft.draws.append(self.order.draw())
            return self.order.problem(draft.draws[number][-1])

        wanted = GroupSelection(
            problem,
            options.num_prompts_per_step,
            options.num_generations_per_prompt,
            options.use_dynamic_sampling,
            None if options.oversample == "auto" else options.oversample,
            self._useful_share,
            int(options.num_prompts_per_step * options.dynamic_sampling_max_gen_batches),
        )
        return RolloutTask(wanted, self.sampling, self._seed(draft.step), done or {}, len(draft.draws))

    def held_out_task(self, step: int) -> RolloutTask:
        """Return the validation to sample."""
        temperature = self.config.val_temperature
        sampling = replace(self.sampling, temperature=temperature) if temperature else self.sampling.greedy()
        wanted = GroupSelection(self.validation.__getitem__, len(self.validation), self.config.val_samples_per_problem)
        return RolloutTask(wanted, sampling, self._seed(step))

    def finish(self, draft: PendingRollout, rollout: Rollout) -> Rollout:
        """Note what the rollout, which is complete, tells about its prompts, and shape its rewards."""
        sampled = len(rollout.taught)
        self._useful_share = sum(rollout.taught) / sampled
        self.order.give_back(chain.from_iterable(draft.draws[sampled:]))
        del draft.draws[sampled:]
        for (*_, position), taught in zip(draft.draws, rollout.taught, strict=True):
            self.order.note(position, taught)
        rollout.rested = sum(len(draw) - 1 for draw in draft.draws)
        if self.config.overlong_filtering:
            rollout.leave_out_truncated()
        shaping = self.config.reward_shaping
        if (buffer := shaping.overlong_buffer_length) is not None:
            most, penalty = self.sampling.max_new_tokens, shaping.overlong_buffer_penalty
            for episode in rollout.episodes:
                if episode.reward is not None:
                    episode.reward += overlong_penalty(len(episode.turns[-1][1].tokens), most, buffer, penalty)
        return rollout

    def _seed(self, step: int) -> int:
        return self.config.seed * 1_000_003 + step


@contextmanager
def _naming(step: int) -> Iterator[None]:
    """Within the block, an engine's error names the step."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"step {step}: {error}") from error
