"""Turns a training command line into runs: compose, validate, run."""

import logging
import shlex
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from nemo_rl_lite.config.keys import CONFIG_NAME, config_dir, run_with_hydra
from nemo_rl_lite.config.overrides import RUN_FOLDER, SWEEP_FOLDER, check_overrides, given_keys, named_run_folder
from nemo_rl_lite.errors import ConfigError, LauncherError, RunStopped, Violation, WorkerError
from nemo_rl_lite.host.machine import check_ray_address, check_single_launcher, why_not_writable
from nemo_rl_lite.rules.compose import compose_command, resolve
from nemo_rl_lite.rules.notes import notes, show
from nemo_rl_lite.run.flags import split_arguments
from nemo_rl_lite.run.sweep import Sweep, jobs, sweep_problems

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from nemo_rl_lite.observability.summary import Summary


def launch(arguments: Sequence[str]) -> "list[Summary]":
    """Run the command line, and return the summary of each run (several with -m, none with --help and the like)."""
    flags, overrides = split_arguments(arguments)
    sweep = Sweep(overrides)
    summaries: list[Summary] = []

    def task(composed: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        folder = Path(hydra_config.runtime.output_dir)
        end: Summary | int
        try:
            end = _guarded(composed, folder, arguments)
            summaries.append(end)
        except SystemExit as status:
            if not flags.sweeps or _was_ended(status):
                raise
            end = status.code if isinstance(status.code, int) and status.code else LauncherError.exit_status
        except Exception:
            if not flags.sweeps:
                raise
            # Hydra would report only the first failure, after all jobs.
            traceback.print_exc()
            end = LauncherError.exit_status
        sweep.ended.append((hydra_config.overrides.task, folder, end))

    try:
        accepted, violations = check_overrides(overrides, flags.sweeps)
        wrong = [*flags.problems(), *sweep_problems(flags, overrides)]
        if wrong or violations or not flags.only_informs:
            # Check before Hydra makes the run's folder, and before the first job of a sweep.
            _check(jobs(overrides) if flags.sweeps else [overrides], wrong, violations)
        if not flags.only_informs:
            _check_folder(overrides, SWEEP_FOLDER if flags.sweeps else RUN_FOLDER)
            check_single_launcher()
            check_ray_address()
        if flags.dry_run:
            _dry_run(overrides, flags.sweeps)
            return []
        if flags.only_informs:
            sys.argv = [sys.argv[0], *flags.given, *accepted]
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=CONFIG_NAME)(task)()
        else:
            run_with_hydra(task, accepted, flags.sweeps)
    except ConfigError as error:
        fail(error)
    if flags.sweeps:
        sweep.show()
    if failed := sweep.failed:
        numbers = ", ".join(f"#{number}" for number, _ in failed)
        sys.stderr.write(f"{len(failed)} of {len(sweep.ended)} jobs of the sweep failed: {numbers}\n")
        sys.exit(failed[0][1])
    return summaries


def _check(jobs: Iterable[Sequence[str]], wrong: Sequence[Violation], of_overrides: Sequence[Violation]) -> None:
    """Check the overrides of every job, and print what there is to note. Raises ConfigError, of what is wrong
    with a job, and of `wrong`; of `of_overrides`, those of the whole command, where no job has a problem."""
    told: dict[str, None] = {}
    try:
        for job in jobs:
            told |= dict.fromkeys(notes(compose_command(job), given_keys(job)))
    except ConfigError as error:
        raise ConfigError([*wrong, *error.violations]) from None
    if wrong or of_overrides:
        raise ConfigError([*wrong, *of_overrides])
    show(told)


def _check_folder(overrides: Sequence[str], key: str) -> None:
    """Raise ConfigError where the folder of the run or of the sweep is empty text, cannot be written, or is inside
    another run's."""
    named = named_run_folder(overrides, key)
    # Only Hydra knows what a reference stands for.
    folder = "." if named is not None and "${" in named else "outputs" if named is None else named
    if rule := why_not_writable(Path(folder)) if folder else "is empty":
        raise ConfigError([Violation(key, folder, rule, "name another folder, or free some space")])
    from nemo_rl_lite.run.folder import check_place

    check_place(Path(folder), key)


def _was_ended(end: SystemExit) -> bool:
    """Whether the user or the scheduler ended the job, which also ends the sweep."""
    from nemo_rl_lite.host.stopping import INTERRUPTED, was_asked_to_end

    return end.code in (INTERRUPTED, RunStopped.exit_status) or was_asked_to_end()


def _dry_run(overrides: Sequence[str], sweeps: bool) -> None:
    from nemo_rl_lite.run.dry_run import dry_run

    # Each job of a sweep has its own folder.
    named = None if sweeps else named_run_folder(overrides)
    try:
        for job in jobs(overrides):
            dry_run(compose_command(job), job, Path(named) if named else None)
    except LauncherError as error:
        fail(error)


def _guarded(composed: DictConfig, folder: Path, arguments: Sequence[str]) -> "Summary":
    try:
        config = resolve(composed)
    except ConfigError as error:
        fail(error)
    from nemo_rl_lite.cluster.access import close_to_others

    close_to_others()
    from nemo_rl_lite.host.stopping import interrupted_status
    from nemo_rl_lite.run.folder import ERROR_FILE, how_to_resume, write_error
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
        sys.stderr.write(f"\ninterrupted; what was done so far is in {folder}; {how_to_resume(folder)}\n")
        sys.exit(interrupted_status(saves))


def fail(error: LauncherError, *more: str) -> NoReturn:
    """Print the error and exit with its status."""
    sys.stderr.write("\n".join([str(error), *more]) + "\n")
    sys.exit(error.exit_status)
