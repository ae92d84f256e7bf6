"""Turns a training command line into runs: compose, validate, run."""

import itertools
import logging
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from nemo_rl_lite.config.keys import CONFIG_NAME, config_dir
from nemo_rl_lite.config.overrides import RUN_FOLDER, check_overrides, named_run_folder
from nemo_rl_lite.errors import ConfigError, LauncherError, RunStopped, Violation, WorkerError
from nemo_rl_lite.host.disk import why_not_writable
from nemo_rl_lite.rules.compose import compose_config, resolve

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from nemo_rl_lite.observability.summary import Summary

# Hydra's flags that print something instead of running, and those that take a value.
_INFORMATION = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
_INFO = ("--info", "-i")
_INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
# This launcher's own flag: do everything up to the first process.
_DRY_RUN = "--dry-run"
_SWEEP = ("--multirun", "-m")


def launch(arguments: Sequence[str]) -> "list[Summary]":
    """Run the command line, and return the summary of each run (several with -m, none with --help and the like)."""
    flags, overrides = split_arguments(arguments)
    sweeps = any(flag in _SWEEP for flag in flags)
    summaries: list[Summary] = []
    # Number and exit status of each job of a sweep that failed.
    failed: list[tuple[int, Any]] = []

    def task(composed: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        try:
            summaries.append(_guarded(composed, Path(hydra_config.runtime.output_dir), arguments))
        except SystemExit as end:
            if not sweeps or _was_ended(end):
                raise
            failed.append((hydra_config.job.num, end.code))
        except Exception:
            if not sweeps:
                raise
            # Hydra would report only the first failure, after all jobs.
            traceback.print_exc()
            failed.append((hydra_config.job.num, LauncherError.exit_status))

    try:
        accepted, violations = check_overrides(overrides)
        if only_informs(flags) and sweeps:
            violations.append(Violation(" ".join(flags), None, "a sweep runs, the other flag only prints", "drop one"))
            raise ConfigError(violations)
        if violations or not only_informs(flags):
            # Check before Hydra makes the run's folder, and before the first job of a sweep.
            for job in _jobs(overrides) if sweeps else [overrides]:
                compose_config(job)
        if not only_informs(flags) and not sweeps:
            _check_run_folder(named_run_folder(overrides))
        if _DRY_RUN in flags:
            _dry_run(flags, overrides, sweeps)
            return []
        sys.argv = [sys.argv[0], *flags, *accepted]
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=CONFIG_NAME)(task)()
    except ConfigError as error:
        fail(error)
    if failed:
        numbers = ", ".join(f"#{number}" for number, _ in failed)
        sys.stderr.write(f"{len(failed)} of {len(failed) + len(summaries)} jobs of the sweep failed: {numbers}\n")
        sys.exit(failed[0][1])
    return summaries


def _check_run_folder(named: str | None) -> None:
    """Raise ConfigError where the run's folder is empty text, or cannot be written."""
    # Only Hydra knows what a reference stands for.
    folder = "." if named is not None and "${" in named else "outputs" if named is None else named
    if rule := why_not_writable(Path(folder)) if folder else "is empty":
        raise ConfigError([Violation(RUN_FOLDER, folder, rule, "name another folder, or free some space")])


def _was_ended(end: SystemExit) -> bool:
    """Whether the user or the scheduler ended the job, which also ends the sweep."""
    from nemo_rl_lite.host.stopping import INTERRUPTED, was_asked_to_end

    return end.code in (INTERRUPTED, RunStopped.exit_status) or was_asked_to_end()


def _dry_run(flags: Sequence[str], overrides: Sequence[str], sweeps: bool) -> None:
    from nemo_rl_lite.run.dry_run import dry_run

    if others := [flag for flag in flags if flag not in (_DRY_RUN, *_SWEEP)]:
        raise ConfigError([Violation(_DRY_RUN, None, f"cannot be combined with {' '.join(others)}", "drop one")])
    # Each job of a sweep has its own folder.
    named = None if sweeps else named_run_folder(overrides)
    try:
        for job in _jobs(overrides):
            dry_run(compose_config(job), job, Path(named) if named else None)
    except LauncherError as error:
        fail(error)


def only_informs(flags: Sequence[str]) -> bool:
    """Whether Hydra will print something (--help, --cfg job, ...) and run nothing."""
    return any(flag.split("=")[0] in _INFORMATION for flag in flags)


def _jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of each job of a sweep, in the order of Hydra's basic sweeper."""
    choices = [values for override in overrides if (values := _values(override))]
    return map(list, itertools.product(*choices))


def _values(argument: str) -> list[str]:
    """An override for each value of the sweep; empty where only Hydra knows the values."""
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


def _guarded(composed: DictConfig, folder: Path, arguments: Sequence[str]) -> "Summary":
    try:
        config = resolve(composed)
    except ConfigError as error:
        fail(error)
    from nemo_rl_lite.cluster.access import close_to_others

    close_to_others()
    from nemo_rl_lite.host.stopping import interrupted_status
    from nemo_rl_lite.run.folder import ERROR_FILE, write_error
    from nemo_rl_lite.run.run import run

    command = shlex.join(["python", "-m", "nemo_rl_lite.train", *arguments])
    try:
        return run(config, folder, command)
    except WorkerError as error:
        write_error(folder, error)
        fail(error, f"its traceback: {folder / ERROR_FILE}", f"its log: {folder / 'logs'}")
    except LauncherError as error:
        fail(error)
    except OSError as error:
        log.info("the error's traceback", exc_info=True)
        fail(LauncherError(f"{folder}: {error}"))
    except KeyboardInterrupt:
        saves = config.checkpoint.save_period > 0
        more = f"; to resume, give the same command with hydra.run.dir={folder}" if saves else ""
        sys.stderr.write(f"\ninterrupted; what was done so far is in {folder}{more}\n")
        sys.exit(interrupted_status(saves))


def fail(error: LauncherError, *more: str) -> NoReturn:
    """Print the error and exit with its status."""
    sys.stderr.write("\n".join([str(error), *more]) + "\n")
    sys.exit(error.exit_status)
