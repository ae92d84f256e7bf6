"""A step's rollout, from the data and the engines' present weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain

from nemo_rl_lite.config.sections.algorithm import GRPOConfig
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Completion, Request, Requests, Sampling
from nemo_rl_lite.losses.advantages import overlong_penalty
from nemo_rl_lite.rollout.collector import Gathering, RolloutCollector, Show
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.groups import Wanted
from nemo_rl_lite.rollout.order import PromptOrder
from nemo_rl_lite.rollout.rollout import Rollout


@dataclass(eq=False)
class Draft:
    """The rollout of a step, from its first prompt on."""

    step: int
    draws: list[list[int]] = field(default_factory=list)
    """The positions of its prompts in the training set, by number, each after those that were passed over on the way
    to it; see `PromptOrder.draw`."""


@dataclass(frozen=True)
class _OfStep:
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
        draft = Draft(step)
        with _naming(step):
            return self.finish(draft, self.collector.collect(self.gathering(draft), show))

    def held_out(self, step: int, show: Show = lambda _: None) -> Rollout:
        """`val_samples_per_problem` responses to each held-out problem, at `val_temperature`."""
        with _naming(step):
            return self.collector.collect(self.held_out_gathering(step), show)

    async def gather(self, gathering: Gathering, step: int, requests: Requests) -> Rollout:
        """Sample what belongs to a step while the engines serve, perhaps several steps at a time."""
        with _naming(step):
            return await self.collector.gather(gathering, _OfStep(requests, step))

    def gathering(self, draft: Draft, done: Mapping[int, list[Episode]] | None = None) -> Gathering:
        """Return the rollout to sample. `done`: the episodes of its prompts, by number, that an earlier run has
        finished."""
        options = self.config

        def problem(number: int) -> Problem:
            while len(draft.draws) <= number:
                draft.draws.append(self.order.draw())
            return self.order.problem(draft.draws[number][-1])

        wanted = Wanted(
            problem,
            options.num_prompts_per_step,
            options.num_generations_per_prompt,
            options.use_dynamic_sampling,
            None if options.oversample == "auto" else options.oversample,
            self._useful_share,
            int(options.num_prompts_per_step * options.dynamic_sampling_max_gen_batches),
        )
        return Gathering(wanted, self.sampling, self._seed(draft.step), done or {}, len(draft.draws))

    def held_out_gathering(self, step: int) -> Gathering:
        """Return the validation to sample."""
        temperature = self.config.val_temperature
        sampling = replace(self.sampling, temperature=temperature) if temperature else self.sampling.greedy()
        wanted = Wanted(self.validation.__getitem__, len(self.validation), self.config.val_samples_per_problem)
        return Gathering(wanted, sampling, self._seed(step))

    def finish(self, draft: Draft, rollout: Rollout) -> Rollout:
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
        if self.config.reward_shaping.overlong_buffer_length is not None:
            self._shape(rollout, self.config.reward_shaping.overlong_buffer_length)
        return rollout

    def _seed(self, step: int) -> int:
        return self.config.seed * 1_000_003 + step

    def _shape(self, rollout: Rollout, buffer: int) -> None:
        most, penalty = self.sampling.max_new_tokens, self.config.reward_shaping.overlong_buffer_penalty
        for episode in rollout.episodes:
            if episode.reward is not None:
                _, last = episode.turns[-1]
                episode.reward += overlong_penalty(len(last.tokens), most, buffer, penalty)


@contextmanager
def _naming(step: int) -> Iterator[None]:
    """Within the block, an engine's error names the step."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"step {step}: {error}") from error
