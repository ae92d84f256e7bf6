"""A run's folder: its lock, and its configuration, command, environment and status.

docs/dashboards.md describes all files.
"""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nemo_rl_lite.checkpoint.resume import CHECKPOINTS, changed, checkpoints_around
from nemo_rl_lite.checkpoint.store import CheckpointStore, has_any
from nemo_rl_lite.config.keys import RUN_FOLDER, flatten
from nemo_rl_lite.errors import ConfigError, LauncherError, RunStopped, Violation, WorkerError
from nemo_rl_lite.observability.environment import (
    CHANGES_FILE,
    COMMAND_FILE,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    ERROR_FILE,
    STATUS_FILE,
    describe_environment,
    redact_command,
    redact_text,
    uncommitted_changes,
)
from nemo_rl_lite.observability.live import LIVE_FILE
from nemo_rl_lite.observability.runs import LOCK_FILE, is_run, read_json
from nemo_rl_lite.observability.summary import SUMMARY_FILE
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.system.machine import why_full
from nemo_rl_lite.system.stopping import interrupted_status, why_interrupted

log = logging.getLogger(__name__)
# A finished run is resumed if only these keys changed.
_LENGTH = {"algorithm.max_num_steps", "algorithm.max_num_epochs"}
_SHOWN_CHANGES = 3
# Files that a start replaces.
_OF_A_START = (
    *(SUMMARY_FILE, ERROR_FILE, COMMAND_FILE, CONFIG_FILE, ENVIRONMENT_FILE, CHANGES_FILE),
    *(STATUS_FILE, LIVE_FILE),
)


@contextmanager
def locked(folder: Path, key: str = RUN_FOLDER) -> Iterator[None]:
    """Lock the folder against other processes during the block. Child processes do not inherit the lock.

    Raises:
        ConfigError: another process is running there; `key` names the folder.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context((folder / LOCK_FILE).open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = f"another process is running there{_running_process(folder)}"
            fix = "wait for it, end it, or name another folder"
            raise ConfigError([Violation(key, str(folder), rule, fix)]) from None
        except OSError as error:
            log.warning("%s cannot be locked against a second run in it: %s", folder, error)
        yield


def check_folder(folder: Path, whole_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder holds another run or a finished one."""
    if not (folder / METRICS_FILE).exists():
        return
    changes = changed(read_json(folder / CONFIG_FILE), json.loads(json.dumps(whole_config))).keys()
    if (folder / SUMMARY_FILE).exists() and not (changes and changes <= _LENGTH):
        others = sorted(changes - _LENGTH)
        shown = ", ".join(others[:_SHOWN_CHANGES]) + ", ..." * (len(others) > _SHOWN_CHANGES)
        rule = "holds a run already, and it is done" + (f"; the command changes {shown}" if others else "")
        lengths = [key for key in sorted(_LENGTH) if key in dict(flatten(whole_config))]
        fix = f"name another folder, with checkpoint.resume_from={folder} to continue from it, or change nothing but "
        fix += " or ".join(lengths)
        raise ConfigError([Violation(RUN_FOLDER, str(folder), rule, fix)])
    if changes and not has_any(folder / CHECKPOINTS):
        rule = "holds a run already, without a checkpoint; a second one would be mixed into it"
        raise ConfigError([Violation(RUN_FOLDER, str(folder), rule, "name another folder, or remove this one")])


def how_to_resume(folder: Path) -> str:
    """Return a sentence on how to resume an interrupted run."""
    if has_any(folder / CHECKPOINTS):
        newest = CheckpointStore(folder / CHECKPOINTS).latest()
        where = f" from the checkpoint of step {newest.step}" if newest else ""
        return f"to resume{where}, give the same command with {RUN_FOLDER}={folder}"
    return "no checkpoint was saved (checkpoint.save_period), so the run cannot be resumed"


def check_place(folder: Path, key: str) -> None:
    """Raise ConfigError if the folder, which `key` names, is inside another run's folder."""
    folder = folder.resolve()
    within = checkpoints_around(folder)
    # A run may resume in its own folder; a sweep must not use one.
    places = folder.parents if key == RUN_FOLDER else (folder, *folder.parents)
    run = next((place for place in places if is_run(place)), within and within.parent)
    if run is not None:
        rule = f"is inside the folder of another run, {run}" + (", among its checkpoints" if within else "")
        fix = f"to resume that run: {RUN_FOLDER}={run}; or a folder outside"
        raise ConfigError([Violation(key, str(folder), rule, fix)])


def write_start(folder: Path, whole_config: Mapping[str, Any], command: str) -> None:
    """Write the command, configuration, environment and uncommitted changes; remove the summary and the error of an
    earlier start."""
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    (folder / ERROR_FILE).unlink(missing_ok=True)
    _append(folder / COMMAND_FILE, f"{redact_command(command)}\n")
    for name, content in ((CONFIG_FILE, whole_config), (ENVIRONMENT_FILE, describe_environment())):
        (folder / name).unlink(missing_ok=True)
        _append(folder / name, json.dumps(content, indent=2) + "\n")
    (folder / CHANGES_FILE).unlink(missing_ok=True)
    if changes := uncommitted_changes():
        _append(folder / CHANGES_FILE, f"{changes}\n")


def write_data_identity(folder: Path, data: Mapping[str, Any]) -> None:
    """Add counts and digests of the rows (`data_identity`) to environment.json."""
    content = read_json(folder / ENVIRONMENT_FILE) | {"data": data}
    (folder / ENVIRONMENT_FILE).unlink(missing_ok=True)
    _append(folder / ENVIRONMENT_FILE, json.dumps(content, indent=2) + "\n")


@contextmanager
def kept_unless_begun(folder: Path, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Restore the files of an earlier start if the block fails before the run has begun."""
    earlier = {
        file: (file.read_bytes(), file.stat().st_mode) for name in _OF_A_START if (file := folder / name).is_file()
    }
    is_resumed = (folder / METRICS_FILE).exists()
    try:
        yield
    except BaseException:
        if is_resumed and not has_begun():
            for name in _OF_A_START:
                (folder / name).unlink(missing_ok=True)
            for file, (content, mode) in earlier.items():
                file.write_bytes(content)
                file.chmod(mode)
        raise


def write_error(folder: Path, error: WorkerError) -> None:
    """Write error.txt: a worker's error with its traceback, or with every rank's stack."""
    (folder / ERROR_FILE).unlink(missing_ok=True)
    _append(folder / ERROR_FILE, redact_text(f"{error}\n\n{error.details}\n"))


def _append(file: Path, text: str) -> None:
    """Append to a file that only its owner and group may read."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640), "w") as opened:
        opened.write(text)


@contextmanager
def status_kept(folder: Path, saves: bool) -> Iterator[None]:
    """Write status.json: `running`, then the end. A killed run stays `running`. `saves`: the run has checkpoints."""
    _write(folder, "running", None, "", _now(), None)
    try:
        yield
    except LauncherError as error:
        write_ending(folder, "stopped" if isinstance(error, RunStopped) else "failed", error.exit_status, str(error))
        raise
    except OSError as error:
        write_ending(folder, "failed", LauncherError.exit_status, why_full(folder, error) or str(error))
        raise
    except KeyboardInterrupt:
        write_ending(folder, "interrupted", interrupted_status(saves), why_interrupted())
        raise
    except BaseException:
        message = "an internal error; its traceback was printed"
        write_ending(folder, "failed", LauncherError.exit_status, message)
        raise
    write_ending(folder, "done", 0, "")


def write_ending(folder: Path, state: str, exit_status: int, message: str) -> None:
    """Write the end into status.json. `state`: done, stopped, interrupted or failed."""
    started = read_json(folder / STATUS_FILE).get("started", _now())
    _write(folder, state, exit_status, redact_text(message), started, _now())


def _running_process(folder: Path) -> str:
    """Return the process and host in status.json, if known."""
    status = read_json(folder / STATUS_FILE)
    known = status.get("state") == "running" and {"pid", "host"} <= status.keys()
    return f" (process {status['pid']} on {status['host']})" if known else ""


def _write(folder: Path, state: str, exit_status: int | None, message: str, started: str, ended: str | None) -> None:
    """Write status.json. Times are ISO 8601, in UTC."""
    content = {
        "state": state,
        "exit_status": exit_status,
        "message": message,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": started,
        "ended": ended,
    }
    partial = folder / f".{STATUS_FILE}"
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(folder / STATUS_FILE)
    except OSError as error:
        log.warning("%s cannot be written: %s", folder / STATUS_FILE, error)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
