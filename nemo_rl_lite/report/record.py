"""Reads a run back from its folder for a report, also a run that is still running, was killed, or lacks files.

`timeline`: the work of engines, environments and rewards in one rollout. `waits`: work and idle time of policy and
engines in the newest steps.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.errors import ConfigError, LauncherError
from nemo_rl_lite.observability.console import PHASES
from nemo_rl_lite.observability.environment import (
    COMMAND_FILE,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    ERROR_FILE,
    STATUS_FILE,
    redact,
    redact_command,
)
from nemo_rl_lite.observability.runs import is_run, metrics_entry, runs_below
from nemo_rl_lite.observability.signal import WeakSignals
from nemo_rl_lite.observability.sinks import spread, text_of
from nemo_rl_lite.observability.trackers import METRICS_FILE, with_every_age
from nemo_rl_lite.planning.advice import Advice
from nemo_rl_lite.rollout.store import Times, read_rollout, read_spans, read_times, rollout_files, step_of
from nemo_rl_lite.validation.compose import default_values

# Number of rollouts that the report shows, evenly spaced over the run, and of samples per rollout.
ROLLOUTS, SAMPLES = 12, 6
_CHARACTERS, _ERROR_LINES = 4000, 40
# Maximum number of drawn episodes, and number of intervals for counting a rollout's calls.
EPISODES, ROLLOUT_PARTS = 256, 120
# Maximum number of drawn steps, and number of intervals for counting their requests.
STEPS, PARTS = 12, 300
# Number of newest rollout files that `waits` reads, validations included.
_FILES = 6 * STEPS
# Seconds of the shortest drawn activity.
_SHORTEST_S = 0.001
_WHOLE = "total_step_time"
# The policy's activity by the name of its timer.
_ACTIVITIES = {timer: phase for phase, (timers, _) in PHASES.items() for timer in timers} | {
    "generation": "wait",
    "checkpointing": "checkpoint",
    "total_validation_time": "validate",
}
Interval = tuple[float, float]
Entry = Mapping[str, float | None]


class ReportError(LauncherError):
    """A folder has no run, or the page cannot be written."""

    exit_status = 2


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder. `notes` list missing and damaged files, weak learning signals, and a faster split
    of the GPUs."""

    folder: Path
    config: dict[str, Any]
    """Values by dotted key, without secrets."""
    metrics: list[dict[str, float | None]]
    samples: list[dict[str, Any]]
    timeline: dict[str, Any] | None
    """`timeline` of the last training rollout."""
    waits: dict[str, Any] | None
    """`waits` of the last steps."""
    environment: dict[str, Any]
    status: dict[str, Any]
    error: str
    command: str
    notes: list[str]

    @property
    def algorithm(self) -> str:
        """The configured algorithm; GRPO if unknown."""
        return str(self.config.get("algorithm.name", "grpo"))


def runs_of(folder: Path) -> list[Path]:
    """Return the runs in a folder, in order; the folder itself if it is a run or has none."""
    return runs_below(folder) or [folder]


def read_run(folder: Path) -> RunRecord:
    """Read a run. Raises ReportError: the folder is not a run's."""
    if not folder.is_dir():
        raise ReportError(f"nrl-lite report: {folder} is not a folder: name that of a run, such as outputs/NAME/TIME")
    if not is_run(folder):
        rule = f"is not a run, and has no run below it: a run has {COMMAND_FILE} or {METRICS_FILE}"
        raise ReportError(f"nrl-lite report: {folder} {rule}")
    notes: list[str] = []
    metrics, status = read_metrics(folder / METRICS_FILE, notes), read_json(folder / STATUS_FILE, notes)
    trained = [file for file in rollout_files(folder) if file.stem.endswith("train")]
    config = dict(flatten(redact(read_json(folder / CONFIG_FILE, notes))))
    notes += WeakSignals(config).at_end(metrics)
    if advice := Advice.of(folder):
        notes += advice.news(metrics)
    return RunRecord(
        folder=folder,
        config=config,
        metrics=with_every_age(metrics)[0],
        samples=_read_samples(folder, notes),
        timeline=_told(lambda: timeline(read_rollout(trained[-1])) if trained else None),
        waits=_told(lambda: waits(folder, metrics, is_done=status.get("state") == "done")),
        environment=dict(flatten(read_json(folder / ENVIRONMENT_FILE, notes))),
        status=status,
        error="\n".join(_read_text(folder / ERROR_FILE).splitlines()[:_ERROR_LINES]),
        command=redact_command((_read_text(folder / COMMAND_FILE).splitlines() or [""])[-1]),
        notes=notes,
    )


def defaults_of(algorithm: str) -> dict[str, Any]:
    """Return an algorithm's default configuration by dotted key; empty for an unknown algorithm."""
    try:
        return dict(flatten(default_values(algorithm)))
    except ConfigError:
        return {}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def read_json(file: Path, notes: list[str]) -> dict[str, Any]:
    """Return the mapping in a file; empty, with a note, if the file is missing or damaged."""
    text = _read_text(file)
    if not text:
        notes.append(f"{file.name} is missing")
        return {}
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, Mapping):
        notes.append(f"{file.name} is incomplete or not JSON")
        return {}
    return dict(content)


def read_metrics(file: Path, notes: list[str]) -> list[dict[str, float | None]]:
    """Return the entries of metrics.jsonl, with a note about unreadable lines."""
    lines = _read_text(file).splitlines()
    entries = [entry for line in lines if (entry := metrics_entry(line)) is not None]
    if missing := len(lines) - len(entries):
        notes.append(f"{missing} of {len(lines)} lines of {file.name} cannot be read and are left out")
    if not entries:
        notes.append("no metrics yet")
    return entries


def metrics_by_step(folder: Path) -> dict[int, dict[str, float | None]]:
    """Return the metrics of each step of a run, also of a running or killed one."""
    found: dict[int, dict[str, float | None]] = {}
    for entry in read_metrics(folder / METRICS_FILE, []):
        found.setdefault(int(entry["step"] or 0), {}).update(entry)
    return found


def _read_samples(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for split in ("train", "validation"):
        files = [file for file in rollout_files(folder) if file.stem.endswith(split)]
        for place in spread(range(len(files)), ROLLOUTS):
            try:
                rows = read_rollout(files[place])
                found += [_shown(rows[row]) for row in spread([row["reward"] for row in rows], SAMPLES)]
            except (OSError, pa.ArrowException, KeyError, TypeError) as error:
                notes.append(f"{files[place].name} cannot be read: {str(error).splitlines()[0]}")
    return found


def _told(read: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """Read rollouts; `_read_samples` notes unreadable files."""
    with suppress(OSError, pa.ArrowException, KeyError, TypeError):
        return read()
    return None


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    texts = {"prompt": text_of(row["prompt"]), "said": text_of(row["turns"]), "answer": row["answer"] or ""}
    kept = {name: row[name] for name in ("step", "split", "reward", "tokens", "ending")}
    for name, text in texts.items():
        cut = len(text) - _CHARACTERS
        kept[name] = text if cut <= 0 else f"{text[:_CHARACTERS]}\n[{cut} more characters in the rollout's file]"
    return kept


def timeline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the calls of a rollout, or None if the rows have no times.

    `lanes` has the mean number of concurrent calls of each engine, the environment and the reward, in ROLLOUT_PARTS
    intervals of `seconds`. `episodes` has each episode's calls as [what, begin, end, engine].
    """
    episodes = [row.get("spans") or [] for row in rows]
    spans = [span for episode in episodes for span in episode]
    seconds = max((span["end"] for span in spans), default=0.0)
    if seconds <= 0:
        return None
    lanes: dict[str, list[Interval]] = {}
    for span in sorted(spans, key=lambda span: (span["what"] != "generate", span["what"], span["place"])):
        lane = f"engine {span['place']}" if span["what"] == "generate" else span["what"]
        lanes.setdefault(lane, []).append((span["begin"], span["end"]))
    stride = -(-len(episodes) // EPISODES)
    return {
        "step": rows[0]["step"],
        "seconds": _rounded(seconds),
        "count": len(episodes),
        "lanes": {name: _mean_count(own, seconds, ROLLOUT_PARTS).round(2).tolist() for name, own in lanes.items()},
        "episodes": [
            [[span["what"], _rounded(span["begin"]), _rounded(span["end"]), span["place"]] for span in episode]
            for episode in episodes[::stride]
        ],
    }


@dataclass(frozen=True, eq=False)
class _Recorded:
    """One rollout file."""

    file: Path
    step: int
    split: str
    times: Times

    def phases(self, activity: str) -> list[Interval]:
        return [(begin, end) for name, begin, end in self.times.phases if _ACTIVITIES.get(name) == activity]

    @property
    def whole(self) -> Interval:
        """Begin and end of the step."""
        (found,) = [(begin, end) for name, begin, end in self.times.phases if name == _WHOLE]
        return found


def waits(folder: Path, metrics: Sequence[Entry], is_done: bool) -> dict[str, Any] | None:
    """Return the work of policy and engines in the last steps; None without samples.

    Times are seconds since the first step shown. There are the `steps`, the `policy`'s activities, and each rollout's
    `requests` in PARTS intervals. Engines were `paused` or `idle`; `shares` are those of the whole time.

    A rollout is written when it is complete. So steps that ended after the last rollout started are left out, unless
    the run `is_done`. Raises OSError or pyarrow.ArrowException: a file cannot be read.
    """
    files = list(_of_newest_process(folder, metrics))
    steps = _known(files, is_done)[-STEPS:]
    if not steps:
        return None
    # Validations before the first and after the last step belong to no step.
    zero, end = steps[0].whole[0], steps[-1].whole[1]
    seconds, drawn = end - zero, [one for one in files if one.step >= steps[0].step]
    asked = {one: list(_generating(one, zero, end)) for one in drawn}
    requests = [{"step": one.step, "split": one.split, "counts": _counts(asked[one], seconds)} for one in drawn]
    waiting = [interval for one in steps for interval in one.phases("wait")]
    paused = _paused(steps, metrics, zero)
    idle = _gaps([*(interval for own in asked.values() for interval in own), *paused], seconds)
    sides = {"policy waits": waiting, "engines idle": idle, "engines paused": paused}
    return {
        "seconds": _rounded(seconds),
        "parts": PARTS,
        "steps": [[one.step, *(_rounded(at - zero) for at in one.whole)] for one in steps],
        "policy": [
            [_ACTIVITIES[name], _rounded(begin - zero), _rounded(until - zero), one.step]
            for one in drawn
            for name, begin, until in one.times.phases
            if name in _ACTIVITIES and begin >= zero and until <= end and until - begin >= _SHORTEST_S
        ],
        "requests": [one for one in requests if one["counts"][1]],
        "paused": [[_rounded(begin), _rounded(until)] for begin, until in paused],
        "idle": [[_rounded(begin), _rounded(until)] for begin, until in idle if until - begin >= _SHORTEST_S],
        "shares": {side: _rounded(sum(until - begin for begin, until in own) / seconds) for side, own in sides.items()},
    }


def _of_newest_process(folder: Path, metrics: Sequence[Entry]) -> Iterator[_Recorded]:
    """Yield the files with times since the last restart of the run."""
    starts = [entry["step"] for entry in metrics if "timing/setup/total" in entry]
    since = max((step for step in starts if step is not None), default=0)
    for file in rollout_files(folder)[-_FILES:]:
        if step_of(file) > since:
            yield _Recorded(file, step_of(file), file.stem.rpartition("-")[2], read_times(file))


def _known(files: Sequence[_Recorded], is_done: bool) -> list[_Recorded]:
    """Return the steps for which the files have all requests of the engines."""
    steps = [one for one in files if one.split == "train" and one.times.phases]
    if is_done:
        return steps
    newest = max((one.times.began for one in steps if one.times.began is not None), default=0.0)
    return [one for one in steps if one.whole[1] <= newest]


def _paused(steps: Sequence[_Recorded], metrics: Sequence[Entry], zero: float) -> list[Interval]:
    """Return the times in which the engines were paused, which end with a refit."""
    paused = {entry["step"]: entry.get("refit/paused_s") for entry in metrics if "refit/seconds" in entry}
    refits = [(one.step, *interval) for one in steps for interval in one.phases("refit")]
    # A synchronous run has no requests then.
    return [(end - (paused.get(step) or end - begin) - zero, end - zero) for step, begin, end in refits]


def _generating(one: _Recorded, zero: float, end: float) -> Iterator[Interval]:
    """Yield the times of a rollout's requests, limited to `zero` to `end`."""
    if one.times.began is None:
        return
    began = one.times.began - zero
    for span in read_spans(one.file):
        begin, until = max(began + span["begin"], 0.0), min(began + span["end"], end - zero)
        if span["what"] == "generate" and begin < until:
            yield begin, until


def _counts(spans: Sequence[Interval], seconds: float) -> tuple[int, list[float]]:
    """Return the first interval with a request, and the mean number of requests from there on."""
    counts = _mean_count(spans, seconds, PARTS)
    (there,) = np.nonzero(counts > 0.005)
    if not len(there):
        return 0, []
    return int(there[0]), counts[there[0] : there[-1] + 1].round(2).tolist()


def _mean_count(spans: Sequence[Interval], seconds: float, parts: int) -> np.ndarray:
    """Return the mean number of concurrent spans in each of `parts` equal intervals."""
    begins, ends = np.array(spans).reshape(-1, 2).T
    edges = np.linspace(0, seconds, parts + 1)
    return np.diff(_elapsed(edges, begins) - _elapsed(edges, ends)) * parts / seconds


def _elapsed(edges: np.ndarray, since: np.ndarray) -> np.ndarray:
    """Return, for each of `edges`, the sum of the seconds since all earlier times."""
    times = np.sort(since)
    passed = np.searchsorted(times, edges)
    return passed * edges - np.concatenate(([0.0], np.cumsum(times)))[passed]


def _gaps(intervals: Iterable[Interval], seconds: float) -> list[Interval]:
    """Return the times between 0 and `seconds` outside all intervals."""
    found, covered = [], 0.0
    for begin, end in sorted([*intervals, (seconds, seconds)]):
        if begin > covered:
            found.append((covered, begin))
        covered = max(covered, end)
    return found


def _rounded(value: float) -> float:
    return round(value, 3)
