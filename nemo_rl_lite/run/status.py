"""What a run writes down of itself, beside what it measures: its configuration, its command, where it runs, how it
ended. docs/dashboards.md describes the whole folder."""

import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from nemo_rl_lite.errors import LauncherError, RunStopped
from nemo_rl_lite.observability.environment import ENVIRONMENT_FILE, describe_environment
from nemo_rl_lite.observability.redaction import redact_text

log = logging.getLogger(__name__)

CONFIG_FILE, COMMAND_FILE = "config.json", "command.txt"
STATUS_FILE, ERROR_FILE = "status.json", "error.txt"


@dataclass(frozen=True)
class Status:
    """How the command that was last given for a run stands. `exit_status` is None while it runs, and where a signal
    ended it. Times are ISO 8601, in UTC."""

    state: Literal["running", "done", "stopped", "interrupted", "failed"]
    exit_status: int | None
    message: str
    host: str
    pid: int
    started: str
    ended: str | None


def write_start(folder: Path, whole_config: Mapping[str, Any], command: str) -> None:
    """Write down what is run, and where. What an earlier start failed with is gone."""
    (folder / ERROR_FILE).unlink(missing_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(whole_config, indent=2) + "\n")
    with (folder / COMMAND_FILE).open("a") as file:
        file.write(f"{command}\n")
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(describe_environment(), indent=2) + "\n")


@contextmanager
def status_kept(folder: Path) -> Iterator[None]:
    """Around a run: status.json says that it is running, then how it ended. One that is killed leaves it as it is."""
    started = _now()
    _write(folder, Status("running", None, "", socket.gethostname(), os.getpid(), started, None))
    ending: tuple[Literal["done", "stopped", "interrupted", "failed"], int | None, str]
    ending = "failed", LauncherError.exit_status, "an error that is no message: its traceback was printed"
    try:
        yield
        ending = "done", 0, ""
    except LauncherError as error:
        ending = "stopped" if isinstance(error, RunStopped) else "failed", error.exit_status, str(error)
        raise
    except KeyboardInterrupt:
        ending = "interrupted", None, "Ctrl-C, or a signal before the first step"
        raise
    finally:
        state, exit_status, message = ending
        _write(
            folder, Status(state, exit_status, redact_text(message), socket.gethostname(), os.getpid(), started, _now())
        )


def running_process(folder: Path) -> str:
    """Which process runs there, by status.json, to be put behind words that say that one does; else nothing."""
    try:
        status = json.loads((folder / STATUS_FILE).read_text())
        return f" (process {status['pid']} on {status['host']})" if status["state"] == "running" else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _write(folder: Path, status: Status) -> None:
    partial = folder / f".{STATUS_FILE}"
    try:
        partial.write_text(json.dumps(asdict(status), indent=2) + "\n")
        partial.replace(folder / STATUS_FILE)
    except OSError as error:
        log.warning("%s cannot be written: %s", folder / STATUS_FILE, error)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
