"""Turns a training command line into runs: flags, jobs of a sweep, composed configurations, exit statuses.

It imports neither torch nor Ray: Ray reads its environment on import, after `close_to_others` has set it.
"""

import difflib
import gc
import itertools
import logging
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nemo_rl_lite import __version__
from nemo_rl_lite.config.composition import CONFIG_NAME, compose_job, notes_on_names, with_implied_files
from nemo_rl_lite.config.experiments import as_words, expanded
from nemo_rl_lite.config.keys import RUN_FOLDER, SWEEP_FOLDER, config_dir, parse_override, unknown_key
from nemo_rl_lite.config.names import in_our_names
from nemo_rl_lite.config.overrides import check_overrides, given_keys, named_run_folder
from nemo_rl_lite.config.sizes import all_gpus
from nemo_rl_lite.errors import ConfigError, LauncherError, RunStopped, Violation, WorkerError
from nemo_rl_lite.planning.disk import little_space, too_little_space
from nemo_rl_lite.system.machine import (
    OWN_RAY,
    RAY_ADDRESS,
    check_ray_address,
    check_single_launcher,
    close_to_others,
    gpu_count,
    lacks_gpus,
    ray_address,
    why_full,
    why_not_writable,
)
from nemo_rl_lite.system.stopping import INTERRUPTED, interrupted_status, was_asked_to_end
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.validation.notes import notes, notes_here, show_notes

if TYPE_CHECKING:
    from nemo_rl_lite.config.schema import Config
    from nemo_rl_lite.observability.callbacks import Callbacks
    from nemo_rl_lite.observability.summary import Summary

log = logging.getLogger(__name__)

# Check and plan everything; start no process.
DRY_RUN = "--dry-run"
LOG_FILE = "train.log"
SWEEP = ("--multirun", "-m")
_CFG, _INFO = ("--cfg", "-c"), ("--info", "-i")
# Values that may follow a flag (None: any); optional for --info.
_VALUES = {
    _CFG: ("job", "hydra", "all"),
    _INFO: ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    ("--package", "-p"): None,
}
# Hydra's flags that print instead of run, and the options of --cfg.
_INFORMATION = ("--help", "-h", "--hydra-help", "--version", *_CFG, *_INFO)
_OF_CFG = ("--resolve", "--package", "-p")
_FILES = ("--like", "--config", "--config-dir", "--config-name")
FLAGS = (*_INFORMATION, *_OF_CFG, *SWEEP, DRY_RUN, *_FILES)

_FLAGS_HELP = """Flags of nrl-lite train:

--dry-run                   check the configuration and data, and plan the memory; start nothing
--multirun, -m              one run per value: -m algorithm.seed=1,2,3
--like RUN                  start from the configuration of a run's folder
--config FILE               an experiment file, the same as FILE.yaml
--config-dir, -cd FOLDER    a folder with GROUP/NAME.yaml files, the same as hydra.searchpath=[file://FOLDER]
--config-name, -cn NAME     an experiment file of that folder
--cfg, -c job|hydra|all     print the configuration; --resolve resolves it, --package, -p KEY prints a part
--info, -i [WHAT]           all, config, defaults, defaults-tree, plugins or searchpath
--help, -h                  groups and examples
--version                   this package's version
"""


def launch(arguments: Sequence[str], owns_process: bool = False) -> "list[Summary]":
    """Run the command line; return the summary of each run (several with -m, none with flags such as --help).

    `owns_process`: this process has no other purpose, so what it has imported is never freed."""
    if "--version" in arguments:
        sys.stdout.write(f"nemo_rl_lite {__version__}\n")
        return []
    if "--hydra-help" in arguments:
        sys.stdout.write(_FLAGS_HELP)
        return []
    flags, overrides = split_arguments(as_words(arguments))
    try:
        overrides = expanded(overrides)
        configs = checked(flags, overrides)
        if flags.dry_run:
            from nemo_rl_lite.run.run import dry_run

            named = named_run_folder(overrides)
            for job, config in configs:
                dry_run(config, job, Path(named) if named and len(configs) == 1 else None)
            return []
    except ConfigError as error:
        # Errors name our keys; the command may use NeMo-RL's.
        keys = [f"is {one.key}=" for one in error.violations]
        fail(error, *(f"note: {told}" for told in in_our_names(overrides)[1] if any(key in told for key in keys)))
    except LauncherError as error:
        fail(error)
    if not flags.only_informs:
        return _run_all(flags, overrides, configs, shlex.join(["nrl-lite", "train", *arguments]), owns_process)
    import hydra

    sys.argv = [sys.argv[0], *flags.given, *with_implied_files(check_overrides(overrides)[0])]
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=CONFIG_NAME)(lambda _: None)()
    return []


def fail(error: LauncherError, *more: str) -> NoReturn:
    sys.stderr.write("\n".join([str(error), *more]) + "\n")
    sys.exit(error.exit_status)


def checked(flags: "Flags", overrides: Sequence[str]) -> "list[tuple[list[str], Config]]":
    """Return the overrides and configuration of each job, and print notes.

    Raises:
        ConfigError: all problems of flags, overrides, jobs, the run's folder and this machine.
    """
    accepted, violations = check_overrides(overrides, flags.sweeps)
    wrong = [*flags.problems(), *sweep_problems(flags, overrides), *violations]
    if flags.only_informs and not wrong:
        return []
    found: list[tuple[list[str], Config]] = []
    # If all overrides are wrong, only the valid defaults are left to compose.
    composes = accepted or not violations
    for job in () if not composes else jobs(overrides) if flags.sweeps else [list(overrides)]:
        try:
            found.append((job, compose_config(job)))
        except ConfigError as error:
            wrong += error.violations
    key = SWEEP_FOLDER if flags.sweeps else RUN_FOLDER
    if not flags.only_informs and key not in [one.key for one in wrong]:
        wrong += _place_problems(overrides, key)
    if not flags.only_informs and not flags.dry_run:
        wrong += [problem for _, config in found for problem in _missing_gpus(config)]
    if not flags.only_informs:
        wrong += [problem for _, config in found for problem in too_little_space(config, _place(overrides, key))]
    if wrong:
        # Each job repeats the problems of the whole command.
        raise ConfigError(list({str(one): one for one in wrong}.values()))
    told = [note for job, config in found for note in (*notes(config, given_keys(expanded(job))), *notes_here(config))]
    told += [note for _, config in found for note in little_space(config, _place(overrides, key))]
    show_notes(dict.fromkeys([*notes_on_names(overrides), *told]))
    return found


def _place_problems(overrides: Sequence[str], key: str) -> Iterator[Violation]:
    """Yield problems of the folder of the run or sweep, and of a second launcher or Ray on this machine."""
    from nemo_rl_lite.run.folder import check_place

    folder = _place(overrides, key)
    if rule := "is empty" if named_run_folder(overrides, key) == "" else why_not_writable(folder):
        yield Violation(key, str(folder), rule, "name another folder, or free some space")
        return
    for check in (partial(check_place, folder, key), check_single_launcher, check_ray_address):
        try:
            check()
        except ConfigError as error:
            yield from error.violations


def _place(overrides: Sequence[str], key: str) -> Path:
    """Return the folder of the run or sweep, or the current one if Hydra must resolve it."""
    named = named_run_folder(overrides, key)
    return Path("outputs" if named is None else "." if "${" in named else named)


def _missing_gpus(config: "Config") -> Iterator[Violation]:
    """Yield a violation if the run would wait for GPUs that this machine lacks."""
    wanted = all_gpus(config)
    if ray_address() in OWN_RAY and lacks_gpus(wanted):
        nodes, count = config.cluster.num_nodes, gpu_count()
        where = f" on {nodes} nodes" if nodes > 1 else ""
        rule = f"the run needs {wanted} GPU{'s' * (wanted > 1)}{where}, and this machine has {count or 'none'}"
        fix = f"check and plan it here with --dry-run; run it on a cluster with {RAY_ADDRESS} or nrl-lite slurm"
        yield Violation("cluster.gpus_per_node", config.cluster.gpus_per_node, rule, fix)


# --- Runs


def _run_all(
    flags: "Flags",
    overrides: Sequence[str],
    configs: "Sequence[tuple[list[str], Config]]",
    command: str,
    owns_process: bool,
) -> "list[Summary]":
    """Run the jobs sequentially. A failed job does not end a sweep; a stopped one does."""
    from nemo_rl_lite.observability.callbacks import Callbacks

    sweep = Sweep(overrides)
    fixed = [one for one in overrides if values_of(one) == [one]]
    parent = str(compose_job(check_overrides(fixed, sweeps=True)[0]).hydra.sweep.dir) if flags.sweeps else None
    for number, (job, config) in enumerate(configs):
        folder = folder_of(job, parent, number)
        folder.mkdir(parents=True, exist_ok=True)
        end: Summary | int
        try:
            with logged_to(folder), _guarded(config, folder):
                end = run_in(folder, config, command, Callbacks(), owns_process)
        except SystemExit as status:
            # A stop by the user or the scheduler ends the sweep.
            was_ended = status.code in (INTERRUPTED, RunStopped.exit_status) or was_asked_to_end()
            if not flags.sweeps or was_ended:
                raise
            end = status.code if isinstance(status.code, int) and status.code else LauncherError.exit_status
        except Exception:
            if not flags.sweeps:
                raise
            traceback.print_exc()
            end = LauncherError.exit_status
        sweep.ended.append((job, folder, end))
    if flags.sweeps:
        sweep.show()
    if failed := sweep.failed:
        numbers = ", ".join(f"#{number}" for number, _ in failed)
        sys.stderr.write(f"{len(failed)} of {len(sweep.ended)} jobs of the sweep failed: {numbers}\n")
        sys.exit(failed[0][1])
    return [end for *_, end in sweep.ended if not isinstance(end, int)]


def folder_of(overrides: Sequence[str], sweep: str | None = None, number: int = 0) -> Path:
    """Return the folder of a run, or of a job of the sweep in the folder `sweep`."""
    from omegaconf import OmegaConf

    composed = compose_job(check_overrides(overrides)[0])
    OmegaConf.update(composed, "hydra.job.num", number, force_add=True)
    hydra = composed.hydra
    folder = Path(hydra.run.dir) if sweep is None else Path(sweep) / str(hydra.sweep.subdir)
    return folder.absolute()


@contextmanager
def logged_to(folder: Path) -> Iterator[None]:
    """Log to the run's train.log, and warnings to standard error, during the block."""
    root, file, terminal = logging.getLogger(), logging.FileHandler(folder / LOG_FILE), logging.StreamHandler()
    file.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] %(message)s"))
    terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    terminal.setLevel(logging.WARNING)
    before, level = root.handlers, root.level
    root.handlers = [terminal, file]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers = before
        root.setLevel(level)
        file.close()


def run_in(
    folder: Path, config: "Config", command: str, callbacks: "Callbacks", owns_process: bool = False
) -> "Summary":
    """Train in `folder`; see `launch`. Raises LauncherError: a worker's traceback is written to the folder."""
    close_to_others()
    from nemo_rl_lite.run.folder import write_error
    from nemo_rl_lite.run.run import run

    if owns_process:
        # Garbage collections would walk through all that is imported, for 0.15 seconds in a rollout.
        gc.collect()
        gc.freeze()
    try:
        return run(config, folder, command, callbacks)
    except WorkerError as error:
        write_error(folder, error)
        raise
    except OSError as error:
        log.info("the error's traceback", exc_info=True)
        raise LauncherError(why_full(folder, error) or f"{folder}: {error}") from error


@contextmanager
def _guarded(config: "Config", folder: Path) -> Iterator[None]:
    """Exit with the message and status of an error."""
    from nemo_rl_lite.observability.environment import ERROR_FILE
    from nemo_rl_lite.run.folder import how_to_resume

    try:
        yield
    except WorkerError as error:
        fail(error, f"its traceback: {folder / ERROR_FILE}", f"its log: {folder / 'logs'}")
    except LauncherError as error:
        fail(error)
    except KeyboardInterrupt:
        saves = config.checkpoint.save_period > 0
        sys.stderr.write(f"\ninterrupted; results so far are in {folder}; {how_to_resume(folder)}\n")
        sys.exit(interrupted_status(saves))


# --- Sweeps


@dataclass
class Sweep:
    """The finished jobs, in order: overrides, folder, and summary or exit status."""

    overrides: Sequence[str]
    ended: "list[tuple[Sequence[str], Path, Summary | int]]" = field(default_factory=list)

    @property
    def failed(self) -> list[tuple[int, int]]:
        """Number and exit status of each failed job."""
        return [(number, end) for number, (_, _, end) in enumerate(self.ended) if isinstance(end, int)]

    def show(self) -> None:
        from nemo_rl_lite.observability.console import RunConsole

        swept = tuple(f"{one.partition('=')[0]}=" for one in self.overrides if values_of(one) != [one])
        rows = []
        for number, (overrides, _, end) in enumerate(self.ended):
            own = " ".join(override for override in overrides if override.startswith(swept))
            seconds = "-" if isinstance(end, int) else f"{end.seconds_a_step:.2f}"
            rows.append([f"#{number}", own, _result(end), seconds])
        RunConsole().table("sweep", ["", "job", "result", "s/step"], rows)
        if self.ended:
            sys.stdout.write(f"one page of all jobs: nrl-lite report {self.ended[0][1].parent}\n")


def _result(end: "Summary | int") -> str:
    if isinstance(end, int):
        return f"failed (status {end})"
    pairs = {
        "held-out accuracy": (end.accuracy_before, end.accuracy_after),
        "held-out reward": (end.reward_before, end.reward_after),
        "held-out loss": (end.val_loss_before, end.val_loss_after),
    }
    shown = [
        f"{name} {'-' if before is None else f'{before:.3f}'} -> {after:.3f}"
        for name, (before, after) in pairs.items()
        if after is not None
    ]
    return ", ".join(shown) or f"{end.steps} steps"


def jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Yield the overrides of each job of a sweep, without the sweep's folder."""
    own = [override for override in overrides if not override.startswith(f"{SWEEP_FOLDER}=")]
    return map(list, itertools.product(*(values for override in own if (values := values_of(override)))))


def values_of(argument: str) -> list[str]:
    """Return an override per value of a sweep; none for a range that cannot be listed."""
    override = parse_override(argument)
    if override is None or not override.is_sweep_override():
        return [argument]
    if not override.is_discrete_sweep():
        return []
    return [f"{argument.partition('=')[0]}={value}" for value in override.sweep_string_iterator()]


def sweep_problems(flags: "Flags", overrides: Sequence[str]) -> list[Violation]:
    """Return why a sweep is invalid: fewer than two jobs, a repeated job, or values that cannot be listed."""
    if not flags.sweeps:
        return []
    listed = [values_of(override) for override in overrides]
    for key, given in [(one.partition("=")[0], one.partition("=")[2]) for one in overrides if not values_of(one)]:
        return [Violation(key, given, "has no list of values", f"{key}=1,2,3 or {key}=range(1,4)")]
    if all(len(values) == 1 for values in listed):
        rule_text, fix = "no key has several values", f"algorithm.seed=1,2,3, or leave {SWEEP[1]} out"
        return [Violation(SWEEP[1], None, rule_text, fix)]
    if twice := next((values for values in listed if len(set(values)) < len(values)), None):
        return [Violation(SWEEP[1], None, f"{' '.join(twice)} has one job twice", "give each value once")]
    return []


# --- Flags


@dataclass(frozen=True)
class Flags:
    given: tuple[str, ...]

    @property
    def sweeps(self) -> bool:
        return any(flag in SWEEP for flag in self.given)

    @property
    def dry_run(self) -> bool:
        return DRY_RUN in self.given

    @property
    def only_informs(self) -> bool:
        """True if Hydra only prints (--help, --cfg job, ...)."""
        return any(_name(flag) in _INFORMATION for flag in self.given)

    def problems(self) -> Iterator[Violation]:
        """Yield problems of flags and their combinations."""
        for flag in self.given:
            if flag.startswith("-") and _name(flag) not in FLAGS:
                yield _unknown(flag)
            elif flag in _FILES:
                yield Violation(
                    flag, None, "needs a value", f"{flag} outputs/my-run" if flag == "--like" else f"{flag} PATH"
                )
            elif "=" in flag and not any(_name(flag) in names for names in _VALUES):
                yield Violation(flag, None, "takes no value", f"write {_name(flag)}, or leave it out")
        names = {_name(flag) for flag in self.given}
        if names & set(_OF_CFG) and not names & set(_CFG):
            lonely = next(flag for flag in self.given if _name(flag) in _OF_CFG)
            yield Violation(lonely, None, "needs --cfg", f"--cfg job {lonely}")
        runs = names & {*SWEEP, DRY_RUN}
        if runs and names & {*_INFORMATION, *_OF_CFG}:
            rule_text = "one of them runs, the other only prints"
            yield Violation(" ".join(self.given), None, rule_text, "drop one")


def split_arguments(arguments: Sequence[str]) -> tuple[Flags, list[str]]:
    flags: list[str] = []
    overrides: list[str] = []
    for argument, previous in zip(arguments, ["", *arguments], strict=False):
        (flags if argument.startswith("-") or _follows(previous, argument) else overrides).append(argument)
    return Flags(tuple(flags)), overrides


def _follows(flag: str, argument: str) -> bool:
    """Return whether `argument` is the value of `flag`. An unknown flag takes anything except an override."""
    if not flag.startswith("-") or "=" in flag:
        return False
    if flag not in FLAGS:
        return "=" not in argument
    values = next((values for names, values in _VALUES.items() if flag in names), ())
    return values is None or argument in values


def _name(flag: str) -> str:
    return flag.partition("=")[0]


def _unknown(flag: str) -> Violation:
    if _name(flag) == "--experimental-rerun":
        return Violation(flag, None, "reads Hydra's own files, which runs do not write", "--like RUN")
    if close := difflib.get_close_matches(_name(flag), FLAGS, n=1, cutoff=0.8):
        return Violation(flag, None, "is an unknown flag", f"did you mean {close[0]}?")
    name, _, value = flag.lstrip("-").partition("=")
    fix = unknown_key(name.replace("-", "_"), value or "...").fix
    return Violation(flag, None, "is an unknown flag", f"options are written as key=value: {fix}")
