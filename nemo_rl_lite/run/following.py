"""Follows and stops runs from outside: a table of runs, the state and the console output of one."""

import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rich.table import Table
from rich.text import Text

from nemo_rl_lite.checkpoint.resume import CHECKPOINTS
from nemo_rl_lite.checkpoint.store import CheckpointStore, files_below
from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.errors import LauncherError, printable
from nemo_rl_lite.observability.console import PHASES, duration
from nemo_rl_lite.observability.environment import CONFIG_FILE, ERROR_FILE
from nemo_rl_lite.observability.runs import RunState, read_json, read_state, silent_s
from nemo_rl_lite.planning.advice import Advice
from nemo_rl_lite.planning.budget import size
from nemo_rl_lite.run.folder import how_to_resume
from nemo_rl_lite.system.stopping import request_end

Say = Callable[[str], None]
LOG_FILE = "train.log"
_POLL_S = 1.0
# A process without a sign of life for this long may hang.
_SILENT_S = 60.0
# Number of warnings that `status` shows.
_WARNINGS = 3
_COLOURS = {"running": "green", "failed": "red", "lost": "red", "stopped": "yellow", "interrupted": "yellow"}
_PHASE_OF = {timer: phase for phase, (timers, _) in PHASES.items() for timer in timers}
_LINE = re.compile(r"\[[^\]]*\]\[(?P<logger>[\w.]+)\]\[(?P<level>[A-Z]+)\] (?P<text>.*)", re.DOTALL)
_CONSOLE = "nemo_rl_lite.observability.console"
_GPU_MEMORY = re.compile(r"ray/node\.\d+\.gpu\.\d+\.mem_gb")


def say_now(line: str) -> None:
    """Print a line, with control characters escaped."""
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()


# --- The table


def runs_table(states: Sequence[RunState]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("run", "state", "step", "reward or loss", "s/step", "started"):
        table.add_column(header, no_wrap=True, justify="right" if header in ("step", "s/step") else "left")
    table.add_column("folder", overflow="fold")
    for one in states:
        value, seconds = one.value, one.seconds_per_step
        table.add_row(
            Text(one.name),
            Text(one.state, style=_COLOURS.get(one.state, "")),
            _steps(one),
            f"{value[0]} {value[1]:.3g}" if value else "-",
            "-" if seconds is None else f"{seconds:.3g}",
            "-" if one.started is None else f"{datetime.fromtimestamp(one.started):%Y-%m-%d %H:%M}",
            Text(shown_path(one.folder)),
        )
    return table


def shown_path(folder: Path) -> str:
    """Return a path relative to the working folder, if it is below."""
    folder = folder.absolute()
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def _steps(state: RunState) -> str:
    return f"{state.step}/{state.total}" if state.total else str(state.step)


# --- The state of one run


def status_rows(state: RunState) -> Iterator[tuple[str, str]]:
    """Yield the rows of `nrl-lite status`: name and text."""
    process = f"process {state.status.get('pid')} on {state.status.get('host')}"
    since = f", since {duration(time.time() - state.started)}" if state.is_running and state.started else ""
    yield state.name, state.state + (f" ({process}){since}" if state.is_running else _ended(state))
    if state.is_running and (doing := state.live.get("doing")):
        progress = f": {state.live['progress']}" if state.live.get("progress") else ""
        phase = _named(doing) if "step" in state.live else f"starting: {_named(doing)}"
        yield "now", f"{phase} for {duration(time.time() - state.live['since'])}{progress}"
    yield "progress", ", ".join(_progress(state))
    shown = ("train/reward", "train/loss", "train/kl_penalty", "train/accuracy", "train/grad_norm")
    last = [f"{name.partition('/')[2]} {value:.3g}" for name in shown if (value := state.latest(name)) is not None]
    if last:
        yield "last step", ", ".join(last)
    labels = {"validation/accuracy": _held_out_label(state.folder), "validation/val_loss": "held-out loss"}
    for name, label in labels.items():
        if (value := state.latest(name)) is not None:
            step = next(int(one["step"]) for one in reversed(state.metrics) if one.get(name) is not None)
            yield label, f"{value:.4g} after step {step}"
    if memory := _memory(state):
        yield "memory", memory
    if advice := Advice.of(state.folder):
        yield from (("faster", sentence) for sentence in advice.news(state.metrics))
    yield "checkpoint", _checkpoint(state)
    for problem in _problems(state):
        yield "ended" if state.state in ("stopped", "interrupted") else "problem", problem
    for warning in _warnings(state.folder):
        yield "log", warning
    yield "folder", str(state.folder.absolute())


def _ended(state: RunState) -> str:
    return f", {duration(time.time() - state.ended)} ago" if state.ended else ""


def _named(doing: str) -> str:
    return _PHASE_OF.get(doing, doing.rpartition("/")[2].replace("_", " "))


def _progress(state: RunState) -> Iterator[str]:
    yield f"step {_steps(state)}" + (f" ({state.step / state.total:.0%})" if state.total else "")
    if (seconds := state.seconds_per_step) is not None:
        yield f"{seconds:.3g} s per step"
    if (left := state.seconds_left) is not None:
        yield f"{duration(left)} left, until {datetime.fromtimestamp(time.time() + left):%a %H:%M}"


def _held_out_label(folder: Path) -> str:
    from nemo_rl_lite.validation.rewards import held_out_label

    return held_out_label(dict(flatten(read_json(folder / CONFIG_FILE))))


def _memory(state: RunState) -> str:
    """Return the highest GPU memory use and the first machine's memory use in the newest step."""
    newest = state.metrics[-1] if state.metrics else {}
    newest = next((one for one in reversed(state.metrics) if "ray/node.0.mem_gb" in one), newest)
    gpus = [value for name, value in newest.items() if _GPU_MEMORY.fullmatch(name)]
    shown = [f"up to {max(gpus):.1f} GiB on each of {len(gpus)} GPUs"] if gpus else []
    if "ray/node.0.mem_gb" in newest:
        shown.append(f"{newest['ray/node.0.mem_gb']:.1f} of {newest['ray/node.0.mem_total_gb']:.1f} GiB on the host")
    return ", ".join(shown)


def _checkpoint(state: RunState) -> str:
    folder = state.folder / CHECKPOINTS
    complete = CheckpointStore(folder).complete()
    free = size(shutil.disk_usage(state.folder).free)
    if not complete:
        return f"none yet; {free} of disk are free"
    newest = complete[-1].path
    nbytes = sum(file.stat().st_size for file in files_below(newest))
    ago = duration(time.time() - newest.stat().st_mtime)
    return f"step {complete[-1].step}, {ago} ago, {size(nbytes)}; {len(complete)} kept; {free} of disk are free"


def _problems(state: RunState) -> Iterator[str]:
    if state.state == "lost":
        process = f"process {state.status.get('pid')} on {state.status.get('host')}"
        yield f"{process} ended without a message (killed, or out of memory?); {how_to_resume(state.folder)}"
    elif state.is_running and (silent := silent_s(state.folder)) > _SILENT_S:
        yield f"no sign of life for {duration(silent)}"
    elif message := state.status.get("message"):
        yield str(message)
    if (state.folder / ERROR_FILE).exists():
        yield f"traceback: {state.folder / ERROR_FILE}"
    for name in ("train/reward_errors", "train/environment_errors", "train/skipped_steps"):
        if (count := state.latest(name)) and state.is_running:
            yield f"{name.partition('/')[2].replace('_', ' ')} in the last step: {count:g}"


def _warnings(folder: Path) -> list[str]:
    with suppress(OSError):
        log = (folder / LOG_FILE).read_text(errors="replace")
        return [line for warns, line in _messages(log) if warns][-_WARNINGS:]
    return []


# --- The console of a run


def tail(folder: Path, lines: int, say: Say = say_now) -> RunState:
    """Say the last `lines` of the run's console output, and then follow it until the run ends.

    Raises:
        LauncherError: the run has no log.
    """
    log, offset, pending, first = folder / LOG_FILE, 0, "", True
    if not log.exists() and not read_state(folder).is_running:
        raise LauncherError(f"{folder} has no {LOG_FILE}")
    while True:
        # Read the state first, so that no line before the end is missed.
        state = read_state(folder)
        with suppress(FileNotFoundError), log.open(errors="replace") as file:
            # Opening the file makes a network file system look for new content.
            file.seek(offset)
            text, offset = pending + file.read(), file.tell()
            whole, end, pending = text.rpartition("\n")
            found = [line for _, line in _messages(whole + end)]
            for line in found[max(0, len(found) - lines) :] if first else found:
                say(line)
            first = False
        if not state.is_running:
            return state
        time.sleep(_POLL_S)


def ending(state: RunState) -> str:
    """Return a sentence on how a run has ended."""
    message = next(_problems(state), "") if state.state == "lost" else state.status.get("message")
    return f"{shown_path(state.folder)}: " + (f"{state.state}: {message}" if message else state.state)


def _messages(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the lines of a log that the terminal showed, each with whether it belongs to a warning."""
    shows = warns = False
    for line in text.splitlines():
        if found := _LINE.match(line):
            warns = logging.getLevelNamesMapping().get(found["level"], 0) >= logging.WARNING
            shows = warns or found["logger"] == _CONSOLE
            line = f"{found['level']}: {found['text']}" if warns else found["text"]
        if shows:
            yield warns, line


# --- Its end


def stop(folder: Path, now: bool = False, say: Say = say_now, limit_s: float | None = None) -> RunState:
    """Stop a run after its current step, with a checkpoint, or `now`. Wait at most `limit_s`; return its state.

    Raises:
        LauncherError: the request cannot be written.
    """
    state = read_state(folder)
    if not state.is_running:
        return state
    try:
        request_end(folder, now)
    except OSError as error:
        _signal(state, now, error)
    say(f"asked {shown_path(folder)} to stop {'at once' if now else 'after its current step, with a checkpoint'}")
    asked, said = time.monotonic(), ""
    while state.is_running and (limit_s is None or time.monotonic() - asked < limit_s):
        time.sleep(_POLL_S)
        state = read_state(folder)
        doing = _named(state.live.get("doing") or "")
        if state.is_running and doing and doing != said:
            said = doing
            say(f"step {_steps(state)} is done; now: {doing}")
    return state


def _signal(state: RunState, now: bool, error: OSError) -> None:
    """Signal the process, because its folder cannot be written: the disk may be full."""
    if state.status.get("host") != socket.gethostname():
        raise LauncherError(f"{state.folder} cannot be written, and its run is on another host: {error}") from error
    os.kill(int(state.status["pid"]), signal.SIGINT if now else signal.SIGTERM)
