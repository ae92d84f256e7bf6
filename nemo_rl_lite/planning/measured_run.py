"""Read the seconds of a step and the lengths of its sequences from the folder of a GRPO run."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus, samples_per_step
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.planning.phase_time import Lengths
from nemo_rl_lite.planning.step_time import StepTime
from nemo_rl_lite.rules.compose import restore

_TEACHER = "timing/train/teacher_logprob_inference"
_LOGPROB, _TRAIN = "timing/train/policy_and_reference_logprobs", "timing/train/policy_training"
_REFIT, _CHECK = "timing/train/prepare_for_generation/transfer_and_update_weights", "timing/train/refit_check"
_PROMPT, _ALL = "train/mean_prompt_length", "train/mean_total_tokens_per_sample"
_GENERATED, _LONGEST = "train/mean_gen_tokens_per_sample", "train/max_gen_tokens_per_sample"
# Where engines work while the policy trains, timing/train/generation is what the policy waits for them.
_RATE = "performance/generation_tokens_per_sec"
_NEEDED = (_LOGPROB, _TRAIN, _REFIT, _CHECK, _ALL, _GENERATED, _LONGEST, _RATE)


@dataclass(frozen=True)
class MeasuredRun:
    """Medians over the steps of a run, without its first."""

    folder: Path
    config: Config
    lengths: Lengths
    time: StepTime


def read_measured(folder: Path, config_file: str) -> MeasuredRun:
    """Read a run, whose folder has its configuration in `config_file`.

    Raises:
        ConfigError: the folder is no run's, or not that of a GRPO run on GPUs that took two steps.
    """
    config = _config(folder, config_file)
    steps = [one for one in _entries(folder / METRICS_FILE) if all(one.get(name) is not None for name in _NEEDED)]
    if not generates(config):
        raise _refused(folder, f"is a run of {config.algorithm.name}, which generates nothing", "a GRPO run")
    if not on_gpus(config):
        raise _refused(folder, "is a run on CPUs, whose seconds say nothing about GPUs", "a run on GPUs")
    if len(steps) < 2:
        rule = (
            f"has {len(steps)} whole steps in {METRICS_FILE}; two are needed, since the first is slower than the rest"
        )
        raise _refused(folder, rule, "a longer run, or --mean-length N")
    found = {name: median(step[name] for step in steps[1:]) for name in _NEEDED}
    generated = found[_GENERATED]
    of_teacher = median(step.get(_TEACHER, 0.0) for step in steps[1:])
    return MeasuredRun(
        folder,
        config,
        Lengths(found[_ALL] - generated, generated, found[_LONGEST]),
        StepTime(
            samples_per_step(config) * generated / found[_RATE],
            found[_LOGPROB] + of_teacher,
            found[_TRAIN],
            found[_REFIT] + found[_CHECK],
        ),
    )


def _config(folder: Path, config_file: str) -> Config:
    try:
        return restore((folder / config_file).read_text(encoding="utf-8"))
    except OSError:
        raise _refused(
            folder, f"is no run's folder: it has no {config_file}", "a run, such as outputs/NAME/TIME"
        ) from None
    except ConfigError:
        rule = f"has a {config_file} that this version cannot read"
        raise _refused(folder, rule, "a run of this version, or --mean-length N") from None


def _entries(file: Path) -> Iterator[Mapping[str, float]]:
    """The lines of a metrics file; the last one of a killed run may be incomplete."""
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _refused(folder: Path, rule: str, fix: str) -> ConfigError:
    return ConfigError([Violation("--from-run", str(folder), rule, fix)])
