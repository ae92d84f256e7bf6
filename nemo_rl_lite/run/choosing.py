"""Measures engine settings by short runs, and chooses the fastest within the mismatch budget."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_lite.config.engines import ENGINES, engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.errors import ConfigError, LauncherError, RunStopped
from nemo_rl_lite.models.shape import NoModelError, find_shape
from nemo_rl_lite.observability.callbacks import Callbacks
from nemo_rl_lite.observability.timer import restart_clock
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.run.command import logged_to, run_in
from nemo_rl_lite.validation.compose import compose_config

_MISMATCH, _RATE = "train/gen_kl_error", "performance/generation_tokens_per_sec"
_GENERATION = "timing/train/generation"
_REFIT = "timing/train/prepare_for_generation/transfer_and_update_weights"
# Fewer steps say nothing about the spread.
LEAST_STEPS = 3


@dataclass(frozen=True)
class Estimate:
    """A mean over steps. `error`: its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), error)


@dataclass(frozen=True)
class Measured:
    """A candidate, as its short run found it."""

    overrides: tuple[str, ...]
    mismatch: Estimate | None
    """`train/gen_kl_error` in nats per token; None if the run failed."""
    rate: Estimate | None
    """Sampled tokens per second of generation and refit."""
    failure: str
    """Empty, or the reason why the run failed."""

    def is_within(self, budget: float) -> bool:
        """Return whether the mismatch is below the budget by two standard errors."""
        return self.mismatch is not None and self.mismatch.mean + 2 * self.mismatch.error <= budget

    @property
    def name(self) -> str:
        pairs = (one.partition("=") for one in self.overrides)
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs) or "as given"


def candidates(config: Config) -> list[tuple[str, ...]]:
    """Return the overrides of each candidate. The first one has none, and is the given configuration."""
    found = list(engine_of(config).precisions)
    if not (found and on_gpus(config)):
        return [(), *((f"generation.backend={name}",) for name in ENGINES if name != config.generation.backend)]
    try:
        shape = find_shape(str(config.policy.model_name))
    except NoModelError:
        return [(), *found]
    # Quantized experts cannot be refitted, and latent attention has other kernels.
    refused = [option for option, of in (("quantization", shape.experts), ("attention_backend", shape.latent)) if of]
    found = [own for own in found if not any(option in one for option in refused for one in own)]
    return [(), *[("policy.router_replay.enabled=true",)] * bool(shape.experts), *found]


def measure(overrides: Sequence[str], own: tuple[str, ...], steps: int, folder: Path, command: str) -> Measured:
    """Run the first steps of a training with a candidate's overrides in a new folder.

    Raises:
        RunStopped: the user or the scheduler stopped the run.
    """
    try:
        config = compose_config([*overrides, *own])
        folder.mkdir(parents=True)
        restart_clock()
        with logged_to(folder):
            run_in(folder, _first_steps(config, steps), command, Callbacks())
    except RunStopped:
        raise
    except ConfigError as error:
        return Measured(own, None, None, error.violations[0].rule)
    except LauncherError as error:
        return Measured(own, None, None, str(error).partition("\n")[0])
    entries = [entry for entry in map(json.loads, (folder / METRICS_FILE).open()) if _MISMATCH in entry]
    if len(entries) < LEAST_STEPS:
        return Measured(own, None, None, f"the run had {len(entries)} steps, and {LEAST_STEPS} are needed")
    return of_steps(own, entries)


def of_steps(own: tuple[str, ...], steps: Sequence[Mapping[str, float]]) -> Measured:
    """Return what the metrics of a run's steps say. The first step warms up, and its rate does not count."""
    rates = [one[_RATE] * one[_GENERATION] / (one[_GENERATION] + one[_REFIT]) for one in steps[1:]]
    return Measured(own, Estimate.of([one[_MISMATCH] for one in steps]), Estimate.of(rates), "")


def choose(measured: Sequence[Measured], budget: float) -> Measured | None:
    """Return the fastest candidate within the budget; None if none is.

    The first one stays unless another is faster by two standard errors of the difference.
    """
    rates = {one: one.rate for one in measured if one.rate is not None and one.is_within(budget)}
    if not rates:
        return None
    first, best = measured[0], max(rates, key=lambda one: rates[one].mean)
    if first in rates:
        gain = rates[best].mean - rates[first].mean
        return best if gain > 2 * math.hypot(rates[best].error, rates[first].error) else first
    return best


def _first_steps(config: Config, steps: int) -> Config:
    """Return the configuration of a synchronous run of some steps, without validation, trackers and checkpoints."""
    options, logger, saves = config.options(GRPOConfig), config.logger, config.checkpoint
    rollouts = replace(options.rollouts, source="on_policy")
    return replace(
        config,
        algorithm=replace(
            options,
            max_num_steps=steps,
            max_num_epochs=None,
            val_period=0,
            val_at_start=False,
            val_at_end=False,
            rollouts=rollouts,
        ),
        generation=replace(config.generation, max_gen_kl=None),
        cluster=replace(config.cluster, max_restarts=0),
        logger=replace(logger, wandb_enabled=False, tensorboard_enabled=False, mlflow_enabled=False, plots=False),
        checkpoint=replace(saves, save_period=0, export_hf_at_end=False, push_to_hub=None),
    )
