"""Where the loop gets its rollouts from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nemo_rl_lite.config.schema import GRPOConfig
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.rollout.collector import RolloutCollector
from nemo_rl_lite.rollout.files import Split
from nemo_rl_lite.rollout.rollout import Rollout


@dataclass(frozen=True)
class RolloutSource:
    """Samples a step's problems with the engines' present weights. Problems and seed depend on run and step alone, so a
    repeated step is the same step."""

    config: GRPOConfig
    collector: RolloutCollector
    sampling: Sampling
    training: TrainingSet
    validation: Sequence[Problem]
    keep: Callable[[int, Split, Rollout], None]
    """Records a rollout of a step for people."""

    def problems(self, step: int) -> list[Problem]:
        first = (step - 1) * self.config.num_prompts_per_step
        return [self.training.problem(first + place) for place in range(self.config.num_prompts_per_step)]

    def sample(self, step: int, problems: Sequence[Problem]) -> Rollout:
        return self._collect(step, problems, self.config.num_generations_per_prompt, self.sampling)

    def sample_held_out(self, step: int) -> Rollout:
        """One response to each held-out problem, at `val_temperature`."""
        temperature = self.config.val_temperature
        sampling = replace(self.sampling, temperature=temperature) if temperature else self.sampling.greedy()
        return self._collect(step, self.validation, 1, sampling)

    def _collect(self, step: int, problems: Sequence[Problem], samples: int, sampling: Sampling) -> Rollout:
        try:
            return self.collector.collect(problems, samples, sampling, self.config.seed * 1_000_003 + step)
        except EngineError as error:
            raise EngineError(f"step {step}: {error}") from error
