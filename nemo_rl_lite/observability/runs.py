"""Find runs below a folder, and read their states from files: also of killed runs and runs on other hosts."""

import difflib
import fcntl
import json
import os
import socket
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.environment import COMMAND_FILE, CONFIG_FILE, STATUS_FILE
from nemo_rl_lite.observability.live import LIVE_FILE
from nemo_rl_lite.observability.trackers import METRICS_FILE

LOCK_FILE = ".lock"
"""File that the run's process keeps locked."""
OUTPUTS = Path("outputs")
LAST = "last"
"""Names the newest run."""
# Levels of folders to search for runs: outputs/NAME/sweep-TIME/0.
_LEVELS = 3
# Number of runs that an error names.
_FEW = 3
# Seconds without a sign of life after which a run on another host is lost. Network file systems update files late.
LOST_S = 120.0
# Bytes to read from the end of metrics.jsonl: several steps.
_TAIL_BYTES = 2**16
_TOTAL = "timing/train/total_step_time"
# Shown metrics, in order of preference.
_SHOWN = {"train/reward": "reward", "train/loss": "loss"}


class NoRunError(LauncherError):
    """There is no such run."""

    exit_status = 2


@dataclass(frozen=True)
class RunState:
    """State of a run according to its files. Times are seconds since the epoch."""

    folder: Path
    name: str
    state: str
    """running, done, stopped, interrupted, failed, lost (the process is gone), or unknown (no status file)."""
    step: int
    total: int | None
    metrics: Sequence[Mapping[str, float]]
    """The last entries of the metrics, in order."""
    started: float | None
    ended: float | None
    status: Mapping[str, Any]
    live: Mapping[str, Any] = field(default_factory=dict)
    """Activity of a running process; see `observability/live.py`."""

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def value(self) -> tuple[str, float] | None:
        """Name and value of the last reward, or else of the last loss."""
        found = ((label, self.latest(name)) for name, label in _SHOWN.items())
        return next(((label, value) for label, value in found if value is not None), None)

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the last steps."""
        seconds = [entry[_TOTAL] for entry in self.metrics if entry.get(_TOTAL) is not None]
        return statistics.median(seconds) if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Predicted from the last steps, including the time between them."""
        times = {int(one["step"]): one["time"] for one in self.metrics if _TOTAL in one and "time" in one}
        if not times or self.total is None or not self.is_running or self.seconds_per_step is None:
            return None
        first, last = min(times), max(times)
        each = (times[last] - times[first]) / (last - first) if last > first else self.seconds_per_step
        return max(0.0, times[last] + (self.total - last) * each - time.time())

    def latest(self, name: str) -> float | None:
        return next((entry[name] for entry in reversed(self.metrics) if entry.get(name) is not None), None)

    def as_json(self) -> dict[str, Any]:
        value = self.value
        return {
            "folder": str(self.folder),
            "name": self.name,
            "state": self.state,
            "step": self.step,
            "total": self.total,
            **({value[0]: value[1]} if value else {}),
            "seconds_per_step": self.seconds_per_step,
            "seconds_left": self.seconds_left,
            "started": self.started,
            "ended": self.ended,
            **{name: self.status.get(name) for name in ("host", "pid", "exit_status", "message")},
        }


def is_run(folder: Path) -> bool:
    """Return whether a run has started in the folder. A model's folder has a config.json, too."""
    return any((folder / name).exists() for name in (COMMAND_FILE, METRICS_FILE))


def runs_below(folder: Path, levels: int = _LEVELS) -> list[Path]:
    """Return the runs in a folder, sorted by name, or by number in a sweep; the folder itself if it is a run."""
    if is_run(folder):
        return [folder]
    if not levels or not folder.is_dir():
        return []
    inside = sorted(folder.iterdir(), key=lambda path: (int(path.name) if path.name.isdecimal() else -1, path.name))
    return [run for path in inside for run in runs_below(path, levels - 1)]


def read_state(folder: Path) -> RunState:
    """Read the state of the run in a folder; files may be missing or incomplete."""
    status, live, config = (read_json(folder / name) for name in (STATUS_FILE, LIVE_FILE, CONFIG_FILE))
    state = str(status.get("state", "unknown"))
    if state == "running" and not _is_alive(folder, status):
        # The run may have ended meanwhile.
        status = read_json(folder / STATUS_FILE)
        state = "lost" if status.get("state") == "running" else str(status.get("state", "unknown"))
    metrics = _newest_metrics(folder / METRICS_FILE)
    trained = [int(entry["step"]) for entry in metrics if _TOTAL in entry]
    algorithm = config.get("algorithm")
    return RunState(
        folder=folder,
        name=str(config.get("run_name") or folder.parent.name),
        state=state,
        step=max(trained, default=0),
        total=live.get("total") or (algorithm.get("max_num_steps") if isinstance(algorithm, dict) else None),
        metrics=metrics,
        started=_seconds(status.get("started")),
        ended=_seconds(status.get("ended")),
        status=status,
        live=live if state == "running" else {},
    )


def read_states(folders: Iterable[Path]) -> list[RunState]:
    """Return the states of all runs below the folders, newest first."""
    found = {run.resolve(): run for folder in folders for run in runs_below(folder)}
    return sorted((read_state(run) for run in found.values()), key=lambda one: one.started or 0.0, reverse=True)


def find_run(word: str, outputs: Path = OUTPUTS) -> Path:
    """Return the newest run that a word names: a run's folder, a folder with runs, a run's name below `outputs`, or
    `last`. Raises NoRunError: there is no such run."""
    given = Path(word).expanduser()
    if is_run(given):
        return given
    if word != LAST and given.is_dir() and (below := read_states([given])):
        return below[0].folder
    states = read_states([outputs])
    if word == LAST and states:
        return states[0].folder
    parts = given.parts
    named = [one for one in states if one.name == word or one.folder.parts[-len(parts) :] == parts]
    if named:
        return named[0].folder
    if not states:
        raise NoRunError(f"{word}: no such run, and no runs in {outputs}/; name a run's folder")
    by_word = {text: one for one in reversed(states) for text in (one.name, str(one.folder), one.folder.name)}
    close = [by_word[text] for text in difflib.get_close_matches(word, by_word)]
    folders = dict.fromkeys(str(one.folder) for one in close or states[:_FEW])
    raise NoRunError(f"{word}: no such run; name its folder, its name or {LAST}: {', '.join(folders)} (nrl-lite runs)")


def existing_or_run(path: Path) -> Path:
    """Return a path that exists unchanged, otherwise the run that it names. Raises NoRunError: there is none."""
    return path if path.exists() else find_run(str(path))


def silent_s(folder: Path) -> float:
    """Return the seconds since the last sign of life of a run."""
    for name in (LIVE_FILE, STATUS_FILE):
        with suppress(OSError), (folder / name).open() as file:
            # Opening a file refreshes its attributes on a network file system.
            return time.time() - os.fstat(file.fileno()).st_mtime
    return float("inf")


def _is_alive(folder: Path, status: Mapping[str, Any]) -> bool:
    """Return whether the process of a running run is alive. On this host, it holds the folder's lock."""
    if status.get("host") == socket.gethostname():
        with suppress(OSError), (folder / LOCK_FILE).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    return silent_s(folder) < LOST_S


def _newest_metrics(file: Path) -> list[dict[str, Any]]:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return []
    return [entry for line in lines if (entry := metrics_entry(line)) is not None]


def metrics_entry(line: str | bytes) -> dict[str, Any] | None:
    """Return the entry in a line of metrics.jsonl; None if the line is incomplete or damaged."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), (int, float)) else None


def read_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a file; empty if the file is missing or incomplete."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _seconds(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
