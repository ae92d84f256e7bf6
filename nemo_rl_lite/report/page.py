"""Make a self-contained HTML page of one or several runs with overlaid curves."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.observability.console import PHASES
from nemo_rl_lite.observability.summary import LAST_STEPS, view_of
from nemo_rl_lite.report.record import ReportError, RunRecord, defaults_of, read_run, runs_of
from nemo_rl_lite.validation.rewards import HELD_OUT_REWARD, held_out_label

PAGE = "report.html"
ASSETS = Path(__file__).parent / "page"
# Approximate NUMBERS in all curves of a page, and the FEWEST and MOST points of one curve.
NUMBERS, FEWEST, MOST = 300_000, 200, 2000
_DIGITS = 6
# Near the start of every page.
_TITLE = b"<title>nemo_rl_lite report</title>"


def write_report(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page and return its path. A folder that is not a run stands for all runs below it. Raises ReportError:
    a folder has no run, or `output` is another file."""
    found = {given: runs_of(given) for given in runs}
    records = [read_run(run) for run in dict.fromkeys(run for below in found.values() for run in below)]
    output = output or (runs[0] / PAGE if len(found) == 1 else Path(PAGE))
    check_output(output, "report", _TITLE)
    output.write_text(page(records), encoding="utf-8")
    for given, below in found.items():
        if below != [given]:
            sys.stderr.write(f"runs below {given}: {len(below)}\n")
    return output


def check_output(output: Path, command: str, title: bytes) -> None:
    """Make the folder of a page. Raises ReportError: `output` is a file without this title, or not named as a page."""
    if output.is_file() and not is_page(output, title):
        raise ReportError(
            f"nrl-lite {command}: {output} exists and is not a {command}: name another file, or remove it"
        )
    if output.suffix not in (".html", ".htm") and not output.is_dir():
        raise ReportError(f"nrl-lite {command}: {output}: it is an HTML page: name a file that ends in .html")
    output.parent.mkdir(parents=True, exist_ok=True)


def page(runs: Sequence[RunRecord]) -> str:
    series = sum(len(_names(run)) for run in runs)
    points = min(MOST, max(FEWEST, NUMBERS // (2 * max(series, 1))))
    data = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "views": {name: _view(name) for name in ALGORITHMS},
        "phases": {phase: list(timers) for phase, (timers, _) in PHASES.items()},
        "lastSteps": LAST_STEPS,
        "runs": [_run(run, name, points) for run, name in zip(runs, _labels(runs), strict=True)],
        "defaults": {name: _texts(defaults_of(name)) for name in sorted({run.algorithm for run in runs})},
    }
    return filled("page.html", ("page.css", "chart.js", "timeline.js", "waits.js", "speed.js", "page.js"), data)


def filled(page: str, parts: Sequence[str], data: Any) -> str:
    """Return a page of `ASSETS` with its parts and data in their places."""
    text = (ASSETS / page).read_text(encoding="utf-8")
    for name in parts:
        text = text.replace(f"/* {name} */", (ASSETS / name).read_text(encoding="utf-8"))
    return text.replace("/* data */", embedded(data))


def is_page(file: Path, title: bytes = _TITLE) -> bool:
    """Return whether a file is empty or a page of any version with this title."""
    with file.open("rb") as opened:
        start = opened.read(2048)
    return not start or title in start


def embedded(data: Any) -> str:
    """Return JSON for a script element, without characters that could end it or begin markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(char, escape)
    # A truncated text may end in half of a surrogate pair.
    return text.encode("utf-8", errors="replace").decode()


def _run(run: RunRecord, label: str, points: int) -> dict[str, Any]:
    times = {entry["step"]: entry["time"] for entry in run.metrics if entry.get("time") is not None}
    first = min(times.values(), default=0.0)
    return {
        "label": label,
        "folder": str(run.folder),
        "algorithm": run.algorithm,
        "labels": _curve_labels(run),
        "status": run.status,
        "error": run.error,
        "command": run.command,
        "notes": run.notes,
        "config": _texts(run.config),
        "environment": _texts(run.environment),
        "minutes": {f"{step:g}": _rounded((time - first) / 60) for step, time in times.items()},
        "series": {name: _series(run, name, points) for name in _names(run)},
        "samples": run.samples,
        "timeline": run.timeline,
        "waits": run.waits,
    }


def _curve_labels(run: RunRecord) -> dict[str, str]:
    view = view_of(run.algorithm, held_out_label(run.config)) if run.algorithm in ALGORITHMS else ()
    return {curve.metric: curve.label for panel in view for curve in panel.curves}


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return a label for each run: its name, with its folder if several runs have the same name."""
    names = [str(run.config.get("run_name", run.folder.name)) for run in runs]
    labels = [
        name if names.count(name) == 1 else f"{name} · {run.folder.name}" for name, run in zip(names, runs, strict=True)
    ]
    return [
        label if labels.count(label) == 1 else f"{label} · {run.folder}"
        for label, run in zip(labels, runs, strict=True)
    ]


def _names(run: RunRecord) -> list[str]:
    return sorted({name for entry in run.metrics for name in entry} - {"step", "time"})


def _series(run: RunRecord, name: str, points: int) -> list[list[float | None]]:
    """Return steps and values: about `points` evenly spaced ones, and the last. NaN becomes None."""
    # A later line of the same step counts, for example of a repeated validation.
    found = {entry["step"]: entry[name] for entry in run.metrics if name in entry}
    steps = sorted(found, key=lambda step: step or 0)
    stride = math.ceil(len(steps) / points)
    kept = sorted({*range(0, len(steps), stride), len(steps) - 1}) if steps else []
    return [[steps[place] for place in kept], [_rounded(found[steps[place]]) for place in kept]]


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as texts. Equal numbers have equal texts: 600.0 and 600."""
    return {
        key: value if isinstance(value, str) else json.dumps(_number(value), default=str)
        for key, value in values.items()
    }


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _view(algorithm: str) -> list[dict[str, Any]]:
    return [
        {
            "title": panel.title,
            "isResult": panel.is_result,
            "curves": [{"metric": one.metric, "heldOut": one.held_out} for one in panel.curves],
        }
        for panel in view_of(algorithm, HELD_OUT_REWARD)
    ]
