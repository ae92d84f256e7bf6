"""`python -m nemo_rl_lite.train [group=file ...] [key.path=value ...]`: compose, validate, run."""

import dataclasses
import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from nemo_rl_lite.config.compose import compose_config, resolve
from nemo_rl_lite.config.keys import CONFIG_NAME, config_dir
from nemo_rl_lite.config.overrides import check_overrides
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, LauncherError, RunStopped, Violation, WorkerError

if TYPE_CHECKING:
    from nemo_rl_lite.observability.report import Summary

INTERRUPTED = 130
CONFIG_FILE = "config.json"
# Hydra's flags that print something instead of running, and those that take a value.
_INFORMATION = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
_INFO = ("--info", "-i")
_INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_SWEEP = ("--multirun", "-m")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line.

    Exit status: 0 done, 1 failed, 2 bad configuration or data, 3 a worker failed, 4 a refit failed, 75 stopped with a
    checkpoint, 130 interrupted.
    """
    launch(sys.argv[1:] if arguments is None else list(arguments))


def launch(arguments: Sequence[str]) -> "list[Summary]":
    """Run what the command line asks for; the summary of each run (several with -m, none with --help and the like)."""
    flags, overrides = split_arguments(arguments)
    summaries: list[Summary] = []

    def task(composed: DictConfig) -> None:
        try:
            config = resolve(composed)
        except ConfigError as error:
            fail(error)
        summaries.append(_guarded(config, Path(HydraConfig.get().runtime.output_dir), arguments))

    try:
        accepted, violations = check_overrides(overrides)
        if only_informs(flags) and any(flag in _SWEEP for flag in flags):
            violations.append(Violation(" ".join(flags), None, "a sweep runs, the other flag only prints", "drop one"))
            raise ConfigError(violations)
        if violations or not only_informs(flags):
            # Before Hydra makes the run's folder, and before the first job of a sweep.
            for job in _jobs(overrides) if any(flag in _SWEEP for flag in flags) else [overrides]:
                compose_config(job)
        sys.argv = [sys.argv[0], *flags, *accepted]
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=CONFIG_NAME)(task)()
    except ConfigError as error:
        fail(error)
    return summaries


def only_informs(flags: Sequence[str]) -> bool:
    """Whether Hydra will print something (--help, --cfg job, ...) and run nothing."""
    return any(flag.split("=")[0] in _INFORMATION for flag in flags)


def _jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of each job of a sweep, as Hydra's basic sweeper makes them."""
    choices = [values for override in overrides if (values := _values(override))]
    return map(list, itertools.product(*choices))


def _values(argument: str) -> list[str]:
    """An override for each value it sweeps over; none where only Hydra can tell the values."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return [argument]
    if not override.is_sweep_override():
        return [argument]
    key = argument.partition("=")[0]
    return [f"{key}={value}" for value in override.sweep_string_iterator()] if override.is_discrete_sweep() else []


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags (with their values) and the overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for argument, previous in zip(arguments, ["", *arguments], strict=False):
        is_value = previous in _WITH_VALUE or (previous in _INFO and argument in _INFO_TOPICS)
        (flags if is_value or argument.startswith("-") else overrides).append(argument)
    return flags, overrides


def run(config: Config, folder: Path, arguments: Sequence[str]) -> "Summary":
    """One training run in `folder`, from starting weights or the folder's newest checkpoint to the report. Where a
    worker's process dies, it goes on from the newest checkpoint."""
    from nemo_rl_lite.cluster.access import close_to_others

    close_to_others()
    from nemo_rl_lite.checkpoint.resume import find_start
    from nemo_rl_lite.cluster.launch import reserve
    from nemo_rl_lite.cluster.runtime import ray_runtime
    from nemo_rl_lite.jobs.interface import make_job
    from nemo_rl_lite.observability.console import RunConsole
    from nemo_rl_lite.observability.report import report, summarize
    from nemo_rl_lite.observability.sinks import MetricsLog
    from nemo_rl_lite.observability.timer import Timer
    from nemo_rl_lite.observability.views import VIEWS

    console = RunConsole()
    whole_config = dataclasses.asdict(config)
    find_start(config, whole_config, folder)
    _open_folder(folder, whole_config, arguments)
    job, restarts = None, 0
    while True:
        start = find_start(config, whole_config, folder)
        if start.steps:
            console.say(f"going on after step {start.steps}, from {start.policy}")
        for change in start.changes:
            console.say(f"changed since then  {change}")
        setup = Timer()
        try:
            with ExitStack() as stack:
                with ray_runtime():
                    # Workers import for as long as the data takes to read and check, or longer.
                    with setup("processes"):
                        reserved = reserve(config, folder, setup)
                    with setup("data"):
                        job = job or make_job(config, folder, console)
                    log = MetricsLog.open(config.logger, folder, whole_config, start.steps)
                    metrics = stack.enter_context(closing(log))
                    peak_memory = job.run(metrics, reserved, start)
                summary = summarize(metrics, folder, peak_memory)
                report(summary, metrics, console, config.run_name, VIEWS[config.algorithm.name], config.logger.plots)
                return summary
        except WorkerError as error:
            if not error.lost or restarts == config.cluster.max_restarts:
                raise
            restarts += 1
            limit = f"restart {restarts} of at most {config.cluster.max_restarts}, cluster.max_restarts"
            console.say(f"{error}; starting again from the last checkpoint ({limit})")


def _open_folder(folder: Path, whole_config: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Write down what is run. Raises ConfigError: the folder holds another run, or one that is done."""
    from nemo_rl_lite.checkpoint.resume import CHECKPOINTS
    from nemo_rl_lite.observability.report import SUMMARY_FILE
    from nemo_rl_lite.observability.sinks import METRICS_FILE

    now = json.dumps(whole_config, indent=2) + "\n"
    kept = folder / CONFIG_FILE
    if (folder / METRICS_FILE).exists():
        same = kept.exists() and kept.read_text() == now
        done = same and (folder / SUMMARY_FILE).exists()
        if done or not (same or any((folder / CHECKPOINTS).glob("step-*"))):
            rule = "holds a run already" + (", and it is done" if done else "; a second one would be mixed into it")
            fix = "name another folder, remove this one, or give it more steps"
            raise ConfigError([Violation("hydra.run.dir", str(folder), rule, fix)])
    # Written again when the run is done.
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    kept.write_text(now)
    with (folder / "command.txt").open("a") as file:
        file.write(shlex.join(["python", "-m", "nemo_rl_lite.train", *arguments]) + "\n")


def _guarded(config: Config, folder: Path, arguments: Sequence[str]) -> "Summary":
    try:
        return run(config, folder, arguments)
    except WorkerError as error:
        (folder / "error.txt").write_text(f"{error}\n\n{error.details}\n")
        fail(error, f"its traceback: {folder / 'error.txt'}", f"its log: {folder / 'logs'}")
    except LauncherError as error:
        fail(error)
    except KeyboardInterrupt as interrupt:
        # The name of a signal that asks to end, of Ctrl-C nothing.
        asked = bool(interrupt.args) and config.checkpoint.save_period > 0
        sys.stderr.write(f"\ninterrupted; what was done so far is in {folder}; the same command goes on from there\n")
        sys.exit(RunStopped.exit_status if asked else INTERRUPTED)


def fail(error: LauncherError, *more: str) -> NoReturn:
    """Say what went wrong and exit with the error's status."""
    sys.stderr.write("\n".join([str(error), *more]) + "\n")
    sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
