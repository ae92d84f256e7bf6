"""Choose the prompts of a step, and sample its rollout with the engines' current weights."""

import hashlib
import json
import logging
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError, EngineError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.losses.advantages import overlong_penalty
from nemo_rl_lite.rollout.collector import RolloutCollector, RolloutTask, Show
from nemo_rl_lite.rollout.episode import Sampled
from nemo_rl_lite.rollout.groups import Players, check_length
from nemo_rl_lite.rollout.mixture import Order, Place
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.saved import SavedRollout

log = logging.getLogger(__name__)


def fitting_prompts(
    training: TrainingSet, validation: Sequence[Problem], tokenizer: ChatTokenizer, config: Config
) -> tuple[TrainingSet, list[Problem]]:
    """Keep the training and validation problems whose prompts leave room for the response. Raises DataError: a prompt
    leaves no room and `data.too_long` is `error`, or no prompt leaves room."""
    max_new_tokens, max_length = config.generation.max_new_tokens, config.policy.max_total_sequence_length

    def length(problem: Problem) -> int:
        try:
            return len(tokenizer.prompt(problem.messages, problem.tools))
        except DataError as error:
            raise DataError(f"the prompt {problem.messages[-1]['content'][:60]!r}: {error}") from None

    if config.data.too_long == "error":
        for problem in [*validation, *training.finite()]:
            check_length(problem, length(problem), max_new_tokens, max_length)
        return training, list(validation)

    def fits(problem: Problem) -> bool:
        return length(problem) + max_new_tokens <= max_length

    kept, kept_validation, room = training.only(fits), list(filter(fits, validation)), max_length - max_new_tokens
    sizes = {"training": (training.finite(), kept.finite()), "validation": (validation, kept_validation)}
    for what, (before, after) in sizes.items():
        count, dropped = len(before), len(before) - len(after)
        if dropped:
            log.warning("%d of %d %s problems dropped: their prompts exceed %d tokens", dropped, count, what, room)
        if before and not after:
            raise DataError(
                f"all {count} {what} prompts exceed {room} tokens: raise policy.max_total_sequence_length, or lower "
                "generation.max_new_tokens"
            )
    return kept, kept_validation


class PromptCooldown:
    """Skips prompts whose rewards were all equal when they were last sampled.

    Such a prompt is skipped for two epochs, the next time for four, then eight, ... up to `most`. Mixed rewards end its
    cooldown. Prompts are identified by their messages and
    answer, so the rows of a file may move.
    """

    def __init__(self, most: int, epoch_length: int, state: Mapping[str, Any] | None = None, position: int = 0):
        """`most`: 0 for no cooldown. `epoch_length`: prompts per epoch, 0 for endless data. `state`: from `state()` of
        an earlier run at this position of its data, which may have had other rows."""
        self._most, self._epoch_length = most, epoch_length
        # By prompt: the first epoch in which it is sampled again, and the length of its cooldown.
        self._rests: dict[str, tuple[int, int]] = {}
        if state and most and epoch_length:
            shift = position // epoch_length - position // state["epoch_length"]
            latest = position // epoch_length + 1 + most
            for name, (until, rest) in state["rests"].items():
                self._rests[name] = (min(until + shift, latest), min(rest, most))

    def rests(self, problem: Problem, position: int) -> bool:
        """Return True if the prompt at this position is skipped."""
        until, _ = self._rests.get(_name(problem), (0, 0)) if self._rests else (0, 0)
        return bool(until) and position // self._epoch_length < until

    def note(self, problem: Problem, position: int, taught: bool) -> None:
        """Note that the prompt at this position has been sampled."""
        if not self._most or not self._epoch_length:
            return
        name = _name(problem)
        _, rested = self._rests.pop(name, (0, 0))
        if not taught:
            rest = min(2 * max(rested, 1), self._most)
            self._rests[name] = (position // self._epoch_length + 1 + rest, rest)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty without cooldowns."""
        if not self._rests:
            return {}
        return {"epoch_length": self._epoch_length, "rests": {name: list(own) for name, own in self._rests.items()}}


def _name(problem: Problem) -> str:
    asked = json.dumps([problem.messages, problem.answer], default=str)
    return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()


class PromptOrder:
    """Draws each position of the training set once, in data order. Prompts in cooldown are skipped. Returned positions
    come next."""

    def __init__(self, training: TrainingSet[Problem], cooldown: PromptCooldown, state: Mapping[str, Any]):
        """`state`: from `state()` of an earlier run; `cooldown` already has its cooldowns."""
        self._training, self._cooldown = training, cooldown
        self._next: int = state["position"]
        self._returned = sorted(state.get("returned", ()))

    def draw(self, step: int) -> list[int]:
        """Return the skipped positions, and then the next one that is sampled, whatever the step."""
        drawn = []
        while True:
            position = self._returned.pop(0) if self._returned else self._next
            self._next = max(self._next, position + 1)
            drawn.append(position)
            if not self._cooldown.rests(self._training.problem(position), position):
                return drawn

    def problem(self, position: int) -> Problem:
        return self._training.problem(position)

    def note(self, position: int, taught: bool) -> None:
        """Note that training uses the prompt at this position; `taught`: whether its rewards differed."""
        self._cooldown.note(self.problem(position), position, taught)

    def give_back(self, draws: Iterable[Sequence[int]]) -> None:
        """Take back positions that were drawn or skipped, but are not used."""
        for position in chain.from_iterable(draws):
            insort(self._returned, position)
        while self._returned and self._returned[-1] == self._next - 1:
            self._next = self._returned.pop()

    def observe(self, sampled: Sequence[Sampled]) -> None:
        """Note nothing: rewards do not change the order."""

    def metrics(self) -> dict[str, float]:
        return {}

    @property
    def epochs(self) -> float | None:
        """Number of passes over the data; None if it is endless."""
        count = len(self._training.finite())
        return self._next / count if count else None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        returned = {"returned": list(self._returned)} if self._returned else {}
        return {"position": self._next, **returned, "resting": self._cooldown.state()}


@dataclass(eq=False)
class PendingRollout:
    """The rollout of a step; `draws`: results of `Order.draw` by prompt number."""

    step: int
    draws: list[list[Place]] = field(default_factory=list)


@dataclass
class Sampler:
    """Samples prompts with the engines' current weights. The weights, the seed, the step and `order` determine a
    rollout, so a repeated step is identical."""

    config: GRPOConfig
    collector: RolloutCollector
    sampling: Sampling
    validation: Sequence[Problem]
    order: Order
    useful_share: float = 1.0
    """Share of useful prompts in the last rollout. It determines how many prompts the next one starts with."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Maximum tokens per response of the sources of a mixture."""
    _last: tuple[PendingRollout, RolloutTask] = field(init=False, repr=False)

    def rollout(self, step: int, show: Show = lambda _: None) -> Rollout:
        """Sample the rollout of a step; see `RolloutCollector.collect` for `show`."""
        draft = PendingRollout(step)
        self._last = draft, self.task(draft)
        with _naming(step):
            return self.finish(draft, self.collector.collect(self._last[1], show))

    def again(self, step: int, show: Show = lambda _: None) -> Rollout:
        """Sample what the last rollout has lost since."""
        draft, task = self._last
        noted = len(draft.draws)
        task.forget(noted)
        with _naming(step):
            return self.finish(draft, self.collector.collect(task, show), noted)

    def held_out(self, step: int, show: Show = lambda _: None) -> Rollout:
        """Sample `val_samples_per_problem` responses to each held-out problem, at `val_temperature`."""
        with _naming(step):
            return self.collector.collect(self.held_out_task(step), show)

    async def gather(self, task: RolloutTask, step: int, players: Players) -> Rollout:
        """Sample a task of a step while the engines serve. Several steps may overlap."""
        with _naming(step):
            return await self.collector.gather(task, players)

    def task(self, draft: PendingRollout, saved: SavedRollout | None = None) -> RolloutTask:
        """Return the task of a rollout, which may continue one of a checkpoint."""
        options = self.config
        most = int(options.num_prompts_per_step * options.dynamic_sampling_max_gen_batches)

        def problem(number: int) -> Problem:
            while len(draft.draws) <= number:
                draft.draws.append(self.order.draw(draft.step))
            return self.order.problem(draft.draws[number][-1])

        return RolloutTask(
            problem,
            options.num_prompts_per_step,
            options.num_generations_per_prompt,
            self.sampling,
            self._seed(draft.step),
            useful=options.use_dynamic_sampling,
            turn_discount=options.turn_discount if options.credit == "turn" else None,
            oversample=None if options.oversample == "auto" else options.oversample,
            share=self.useful_share,
            # A saved complete rollout needs no more prompts.
            most=len(draft.draws) if saved is not None and saved.state.noted else most,
            saved=saved.groups if saved is not None else {},
            begun=len(draft.draws),
            spent_s=saved.state.spent_s if saved is not None else 0.0,
            step=draft.step,
            limits=self.limits,
        )

    def held_out_task(self, step: int) -> RolloutTask:
        """Return the task of a validation after a step."""
        temperature = self.config.val_temperature
        sampling = replace(self.sampling, temperature=temperature) if temperature else self.sampling.greedy()
        count, samples = len(self.validation), self.config.val_samples_per_problem
        return RolloutTask(self.validation.__getitem__, count, samples, sampling, self._seed(step), limits=self.limits)

    def finish(self, draft: PendingRollout, rollout: Rollout, noted: int = 0) -> Rollout:
        """Note which prompts of a complete rollout had mixed rewards, and shape its rewards. `noted`: number of prompts
        that were noted before, when the rollout was complete and then lost."""
        sampled = len(rollout.taught)
        self.useful_share = sum(rollout.taught) / sampled
        self.order.give_back(draft.draws[sampled:])
        del draft.draws[sampled:]
        for (*_, place), taught in list(zip(draft.draws, rollout.taught, strict=True))[noted:]:
            self.order.note(place, taught)
        if not noted:
            self.order.observe(rollout.sampled)
        rollout.progress = self.order.metrics()
        rollout.rested = sum(len(draw) - 1 for draw in draft.draws)
        shape_rewards(rollout, self.config, self.sampling.max_new_tokens, self.limits)
        return rollout

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {**self.order.state(), "useful_share": self.useful_share}

    def _seed(self, step: int) -> int:
        return self.config.seed * 1_000_003 + step


def shape_rewards(rollout: Rollout, options: GRPOConfig, most: int, limits: Mapping[str, int]) -> None:
    """Leave out truncated responses and penalise long ones, as configured. `most`: maximum tokens per response;
    `limits`: those of the sources of a mixture."""
    if options.overlong_filtering:
        rollout.leave_out_truncated()
    shaping = options.reward_shaping
    if (buffer := shaping.overlong_buffer_length) is not None:
        penalty = shaping.overlong_buffer_penalty
        for episode in rollout.episodes:
            if episode.reward is not None:
                own = limits.get(episode.source, most)
                episode.length_penalty = overlong_penalty(episode.last_turn_tokens, own, buffer, penalty)


@contextmanager
def _naming(step: int) -> Iterator[None]:
    """Add the step to an engine's error."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"step {step}: {error}") from error
