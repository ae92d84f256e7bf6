"""Reads a run back from its folder for a report, also a run that is still running, was killed, or lacks files."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from nemo_rl_lite.config.leaves import leaves
from nemo_rl_lite.errors import ConfigError, LauncherError
from nemo_rl_lite.observability.environment import ENVIRONMENT_FILE
from nemo_rl_lite.observability.metrics_log import METRICS_FILE, with_every_age
from nemo_rl_lite.observability.profiling import FOLDER as PROFILE
from nemo_rl_lite.observability.profiling import SUFFIX
from nemo_rl_lite.observability.redaction import redact, redact_command
from nemo_rl_lite.observability.samples import spread, text_of
from nemo_rl_lite.rollout.store import read_rollout, rollout_files
from nemo_rl_lite.rules.compose import default_values
from nemo_rl_lite.run.folder import COMMAND_FILE, CONFIG_FILE, ERROR_FILE, STATUS_FILE
from nemo_rl_lite.run.report.busy import UNREADABLE, busy_by_phase, traces_of
from nemo_rl_lite.run.report.timeline import timeline
from nemo_rl_lite.run.report.waits import waits

# The report shows this many rollouts, evenly over the run, and this many samples of each.
ROLLOUTS, SAMPLES = 12, 6
_CHARACTERS, _ERROR_LINES = 4000, 40
# Bytes of a step's traces that a report reads: unpacked, they are several times as large.
_TRACES = 64 * 2**20
# So far below a folder are its runs: outputs/NAME/sweep-TIME/0.
_LEVELS = 3


class ReportError(LauncherError):
    """Raised for a folder without a run."""

    exit_status = 2


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder. `notes` list what is missing or broken."""

    folder: Path
    config: dict[str, Any]
    """By dotted key, without secrets."""
    metrics: list[dict[str, float | None]]
    samples: list[dict[str, Any]]
    timeline: dict[str, Any] | None
    """Of the newest rollout that it trained on."""
    waits: dict[str, Any] | None
    """Who waited for whom in the newest steps."""
    busy: dict[str, Any] | None
    """How busy GPUs were in each phase of the newest profiled step."""
    environment: dict[str, Any]
    status: dict[str, Any]
    error: str
    command: str
    notes: list[str]

    @property
    def algorithm(self) -> str:
        """The algorithm of the configuration; GRPO where there is no configuration."""
        return str(self.config.get("algorithm.name", "grpo"))


def runs_of(folder: Path) -> list[Path]:
    """The folders of the runs in a folder, by name, and a sweep's by number; for a run's folder, and where there is no
    run, the folder itself."""
    return _runs_below(folder, _LEVELS) or [folder]


def _runs_below(folder: Path, levels: int) -> list[Path]:
    if _is_run(folder):
        return [folder]
    if not levels or not folder.is_dir():
        return []
    inside = sorted(folder.iterdir(), key=lambda path: (int(path.name) if path.name.isdecimal() else -1, path.name))
    return [run for path in inside for run in _runs_below(path, levels - 1)]


def _is_run(folder: Path) -> bool:
    # A model's folder has a config.json as well.
    return any((folder / name).exists() for name in (COMMAND_FILE, METRICS_FILE))


def read_run(folder: Path) -> RunRecord:
    """Read a run. Raises ReportError: `folder` is no run's folder."""
    if not folder.is_dir():
        raise ReportError(f"nrl-lite report: {folder} is not a folder: name a run's, such as outputs/NAME/TIME")
    if not _is_run(folder):
        rule = f"is no run's folder, and no run is below it: a run has {COMMAND_FILE} or {METRICS_FILE}"
        raise ReportError(f"nrl-lite report: {folder} {rule}")
    notes: list[str] = []
    metrics, status = _read_metrics(folder / METRICS_FILE, notes), _read_json(folder / STATUS_FILE, notes)
    return RunRecord(
        folder=folder,
        config=dict(leaves(redact(_read_json(folder / CONFIG_FILE, notes)))),
        metrics=with_every_age(metrics)[0],
        samples=_read_samples(folder, notes),
        timeline=_read_timeline(folder),
        waits=_read_waits(folder, metrics, status),
        busy=_read_busy(folder, notes),
        environment=dict(leaves(_read_json(folder / ENVIRONMENT_FILE, notes))),
        status=status,
        error="\n".join(_read_text(folder / ERROR_FILE).splitlines()[:_ERROR_LINES]),
        command=redact_command((_read_text(folder / COMMAND_FILE).splitlines() or [""])[-1]),
        notes=notes,
    )


def defaults_of(algorithm: str) -> dict[str, Any]:
    """The default configuration of an algorithm by dotted key; empty for an unknown algorithm."""
    try:
        return dict(leaves(default_values(algorithm)))
    except ConfigError:
        return {}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _read_json(file: Path, notes: list[str]) -> dict[str, Any]:
    text = _read_text(file)
    if not text:
        notes.append(f"{file.name} is missing")
        return {}
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, Mapping):
        notes.append(f"{file.name} is incomplete or no JSON")
        return {}
    return dict(content)


def _read_metrics(file: Path, notes: list[str]) -> list[dict[str, float | None]]:
    lines = _read_text(file).splitlines()
    entries = [entry for line in lines if (entry := _entry(line)) is not None]
    if len(entries) < len(lines):
        notes.append(
            f"{len(lines) - len(entries)} of {len(lines)} lines of {file.name} cannot be read and are left out"
        )
    if not entries:
        notes.append("no metrics yet")
    return entries


def _entry(line: str) -> dict[str, float | None] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), (int, float)):
        return None
    return {name: value for name, value in entry.items() if value is None or isinstance(value, (int, float))}


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


def _read_timeline(folder: Path) -> dict[str, Any] | None:
    files = [file for file in rollout_files(folder) if file.stem.endswith("train")]
    # A file that cannot be read is a note of `_read_samples`.
    with suppress(OSError, pa.ArrowException, KeyError, TypeError):
        return timeline(read_rollout(files[-1])) if files else None
    return None


def _read_waits(
    folder: Path, metrics: Sequence[Mapping[str, float | None]], status: Mapping[str, Any]
) -> dict[str, Any] | None:
    with suppress(OSError, pa.ArrowException, KeyError, TypeError):
        return waits(folder, metrics, is_done=status.get("state") == "done")
    return None


def _read_busy(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """The newest step with traces, its phases, and the kinds of processes that used a GPU; None without any."""
    newest = max((folder / PROFILE).glob("step-*"), default=None)
    if newest is None:
        return None
    size = sum(file.stat().st_size for file in newest.glob(f"*{SUFFIX}"))
    if size > _TRACES:
        script = f"python scripts/bench/trace_busy.py {newest} does"
        notes.append(f"the traces of {newest.name} were not read, because they have {size >> 20} MiB; {script}")
        return None
    try:
        phases = busy_by_phase(traces_of(newest))
    except UNREADABLE as error:
        notes.append(f"the traces of {newest.name} cannot be read: {error}")
        return None
    rows = [{"phase": one.phase, "seconds": one.seconds, "shares": one.shares()} for one in phases]
    return {"step": int(newest.name.rpartition("-")[2]), "phases": rows} if rows else None


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    texts = {"prompt": text_of(row["prompt"]), "said": text_of(row["turns"]), "answer": row["answer"] or ""}
    kept = {name: row[name] for name in ("step", "split", "reward", "tokens", "ending")}
    return kept | {name: _cut(text) for name, text in texts.items()}


def _cut(text: str) -> str:
    cut = len(text) - _CHARACTERS
    return text if cut <= 0 else f"{text[:_CHARACTERS]}\n[{cut} more characters in the rollout's file]"
