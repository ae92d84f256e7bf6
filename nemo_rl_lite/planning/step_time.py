"""Predict the seconds of a GRPO step on GPUs: its phases, and who waits for whom."""

from dataclasses import astuple, dataclass

from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.engines import engines_sleep
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import optimizer_steps, previous_passes
from nemo_rl_lite.config.teacher import as_teacher
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.budget import refit_bytes
from nemo_rl_lite.planning.gpus import speed_of
from nemo_rl_lite.planning.phase_time import Lengths, generation_seconds, logprob_seconds, optimizer_step_seconds
from nemo_rl_lite.planning.teacher import teacher_shape

# Seconds of a refit besides its bytes, with the check that follows: engines on their own GPUs, engines that wake up,
# and engines that stay awake on the policy's GPUs.
REFIT_APART_S, REFIT_WAKING_S, REFIT_AWAKE_S = 0.2, 0.35, 0.1
# Bytes/s of a refit: on one machine, and over a link of 400 Gb/s between machines.
RATE_INSIDE, RATE_BETWEEN = 1e11, 5e10


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step's phases."""

    generation: float
    logprob: float
    train: float
    refit: float

    def times(self, factors: "StepTime") -> "StepTime":
        """Each phase times its factor."""
        return StepTime(*(one * by for one, by in zip(astuple(self), astuple(factors), strict=True)))

    def over(self, other: "StepTime") -> "StepTime":
        """The factors by which each phase is longer than the other's."""
        return StepTime(*(one / by for one, by in zip(astuple(self), astuple(other), strict=True)))

    @property
    def policy(self) -> float:
        """What the policy works on a rollout."""
        return self.logprob + self.train

    @property
    def in_turn(self) -> float:
        """Seconds of a step that generates its rollout and then trains on it."""
        return self.generation + self.policy + self.refit

    @property
    def overlapped(self) -> float:
        """Seconds of a step that trains while the engines generate the next rollout."""
        return max(self.generation, self.policy) + self.refit


def assumed_lengths(config: Config, mean: float | None = None) -> Lengths:
    """Lengths before a run. Unless `mean` is given, responses have half of `max_new_tokens`; the longest has all of
    them. Prompts have half of what the longest response leaves of a sequence."""
    longest = config.generation.max_new_tokens
    room = max(2, config.policy.max_total_sequence_length - longest)
    return Lengths(room / 2, longest / 2 if mean is None else mean, longest)


def predict_step(config: Config, shape: ModelShape, gpu_bytes: int, lengths: Lengths) -> StepTime:
    """Predict a step of an algorithm that generates, on GPUs of `gpu_bytes`, whose speed is that of the known GPU with
    the nearest memory."""
    _, gpu = speed_of(gpu_bytes)
    teacher = teacher_shape(config)
    of_teacher = 0.0 if teacher is None else logprob_seconds(as_teacher(config), teacher, gpu, lengths)
    apart = not config.generation.colocated.enabled
    shared_s = REFIT_WAKING_S if engines_sleep(config) else REFIT_AWAKE_S
    rate = RATE_BETWEEN if apart and config.cluster.num_nodes > 1 else RATE_INSIDE
    return StepTime(
        generation_seconds(config, shape, gpu, gpu_bytes, lengths),
        (previous_passes(config) + compares(config)) * logprob_seconds(config, shape, gpu, lengths) + of_teacher,
        optimizer_steps(config) * optimizer_step_seconds(config, shape, gpu, lengths),
        (REFIT_APART_S if apart else shared_s) + refit_bytes(config, shape) / rate,
    )
