"""Keys that have an effect only where a run has enough steps, or the right ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from nemo_rl_lite.config.schema import Config


@dataclass(frozen=True)
class Effect:
    """`keys`, and all below them, have an effect where `holds`; `needs` is how to get there. `otherwise` is what is
    wrong with them elsewhere."""

    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    needs: str
    otherwise: str = "has no effect"


def _is_within_the_run(config: Config) -> bool:
    """Whether algorithm.val_period is at most the run's steps. Who validates at the end may mean the end alone."""
    options = config.algorithm
    return options.val_at_end or options.max_num_steps is None or options.val_period <= options.max_num_steps


def validates(config: Config) -> bool:
    """Whether the run validates at all."""
    options = config.algorithm
    return options.val_at_start or options.val_at_end or (options.val_period > 0 and _is_within_the_run(config))


def _validates_a_saved_step(config: Config) -> bool:
    """Whether the validations come to a step that also has a checkpoint: the last, or one of both periods."""
    options, last = config.algorithm, config.algorithm.max_num_steps
    if not config.checkpoint.keep_best:
        # Who wants no best checkpoints gets none.
        return True
    if options.val_at_end or not options.val_period or last is None:
        return options.val_at_end or options.val_period > 0
    return last % options.val_period == 0 or math.lcm(options.val_period, config.checkpoint.save_period) <= last


_VALIDATION = "a validation: algorithm.val_at_end=true, or an algorithm.val_period up to algorithm.max_num_steps"


STEP_EFFECTS = (
    Effect(
        (
            *(f"algorithm.{name}" for name in ("max_val_samples", "val_temperature", "val_metric")),
            "algorithm.val_samples_per_problem",
            *("algorithm.higher_is_better", "checkpoint.keep_best"),
            *("data.validation_path", "data.validation_split"),
        ),
        validates,
        _VALIDATION,
    ),
    Effect(("algorithm.val_period",), _is_within_the_run, _VALIDATION),
    Effect(("data.validation_fraction",), validates, _VALIDATION, "takes rows from the training that nothing reads"),
    Effect(
        ("checkpoint.keep_best",),
        _validates_a_saved_step,
        "a validation of a step that is saved: algorithm.val_at_end=true, or an algorithm.val_period that is a "
        "multiple of checkpoint.save_period",
    ),
)
