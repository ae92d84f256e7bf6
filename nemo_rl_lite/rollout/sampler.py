"""A step's rollout, from the data and the engines' present weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_lite.config.schema import GRPOConfig
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.losses.advantages import overlong_penalty
from nemo_rl_lite.rollout.collector import RolloutCollector, Show
from nemo_rl_lite.rollout.groups import Wanted
from nemo_rl_lite.rollout.resting import Resting
from nemo_rl_lite.rollout.rollout import Rollout


@dataclass
class Sampler:
    """Samples a step's prompts with the engines' present weights. A rollout depends on these, the run, the step,
    `position` and `resting` alone, so a repeated step is the same step."""

    config: GRPOConfig
    collector: RolloutCollector
    sampling: Sampling
    training: TrainingSet
    validation: Sequence[Problem]
    position: int
    """Prompts of the training set that earlier steps have consumed or passed over."""
    resting: Resting

    def rollout(self, step: int, show: Show = lambda _: None) -> Rollout:
        """Sample the rollout of a step; see `RolloutCollector.collect` for `show`."""
        options, positions = self.config, _Awake(self.training, self.resting, self.position)
        wanted = Wanted(
            lambda number: self.training.problem(positions[number]),
            options.num_prompts_per_step,
            options.num_generations_per_prompt,
            options.use_dynamic_sampling,
            options.oversample,
            int(options.num_prompts_per_step * options.dynamic_sampling_max_gen_batches),
        )
        rollout = self._collect(step, wanted, self.sampling, show)
        sampled = [positions[number] for number in range(len(rollout.taught))]
        rollout.rested = sampled[-1] + 1 - self.position - len(sampled)
        self.position = sampled[-1] + 1
        for position, taught in zip(sampled, rollout.taught, strict=True):
            self.resting.note(self.training.problem(position), position, taught)
        if options.overlong_filtering:
            rollout.leave_out_truncated()
        if options.reward_shaping.overlong_buffer_length is not None:
            self._shape(rollout, options.reward_shaping.overlong_buffer_length)
        return rollout

    def held_out(self, step: int, show: Show = lambda _: None) -> Rollout:
        """One response to each held-out problem, at `val_temperature`."""
        temperature = self.config.val_temperature
        sampling = replace(self.sampling, temperature=temperature) if temperature else self.sampling.greedy()
        return self._collect(step, Wanted(self.validation.__getitem__, len(self.validation), 1), sampling, show)

    def cancel(self) -> None:
        """End a rollout that another thread samples."""
        self.collector.cancel()

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint saves, for the run that resumes from it."""
        return {"position": self.position, "resting": self.resting.state()}

    def _shape(self, rollout: Rollout, buffer: int) -> None:
        most, penalty = self.sampling.max_new_tokens, self.config.reward_shaping.overlong_buffer_penalty
        for episode in rollout.episodes:
            if episode.reward is not None:
                _, last = episode.turns[-1]
                episode.reward += overlong_penalty(len(last.tokens), most, buffer, penalty)

    def _collect(self, step: int, wanted: Wanted, sampling: Sampling, show: Show) -> Rollout:
        try:
            return self.collector.collect(wanted, sampling, self.config.seed * 1_000_003 + step, show)
        except EngineError as error:
            raise EngineError(f"step {step}: {error}") from error


class _Awake:
    """The positions of a training set from `first` on whose prompts do not rest."""

    def __init__(self, training: TrainingSet[Problem], resting: Resting, first: int):
        self._training, self._resting, self._next = training, resting, first
        self._found: list[int] = []

    def __getitem__(self, number: int) -> int:
        while len(self._found) <= number:
            if not self._resting.is_left_out(self._training.problem(self._next), self._next):
                self._found.append(self._next)
            self._next += 1
        return self._found[number]
