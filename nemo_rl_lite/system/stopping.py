"""End a run on request, after its current step and with a checkpoint.

A request is a signal, or the file `stop` in the run's folder, which works from any machine with access to it.
"""

import getpass
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from nemo_rl_lite.errors import RunStopped

# Slurm sends SIGTERM before it takes a job's nodes, and SIGUSR1 with `sbatch --signal=USR1@300`.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_STANDARD_ERROR = 2
# Exit status after Ctrl-C.
INTERRUPTED = 130
# Received signals. Ray replaces the exceptions of signal handlers, so they are recorded here.
_received: list[signal.Signals] = []
# Description of the request in the run's file, and whether it ends the run at once.
_request, _at_once = "", False
# True while a loop defers requests to the end of its step.
_waits_for_step = False
STOP_FILE = "stop"
"""File in the run's folder, empty until there is a request. On network file systems, new content is visible sooner than
a new file."""
_AT_ONCE, _AFTER_STEP = "now", "step"
# Seconds within which a second signal is the same request: `timeout` signals the process and its group.
_SAME_REQUEST_S = 1.0


def note_signal(number: int) -> None:
    """Record a signal. Every handler of SIGNALS calls this."""
    _received.append(signal.Signals(number))


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal like Ctrl-C."""
    if not _at_once:
        note_signal(number)
    raise KeyboardInterrupt


def interrupt_on_signals() -> None:
    """Make SIGNALS end this process like Ctrl-C. Call this before long imports."""
    for number in SIGNALS:
        signal.signal(number, interrupt)


def interrupted_status(saves: bool) -> int:
    """Return the exit status of an interrupted process: that of a stopped run if it was asked to end and `saves`
    checkpoints."""
    return RunStopped.exit_status if saves and was_asked_to_end() else INTERRUPTED


def was_asked_to_end() -> bool:
    """Return True if this process has received one of SIGNALS or a request."""
    return bool(_received or _request)


def why_interrupted() -> str:
    """Return the reason why the run ended at once."""
    return _request or "Ctrl-C, or a signal that ended it at once"


def request_end(folder: Path, now: bool = False) -> None:
    """Ask the run in a folder to end after its step, with a checkpoint, or `now`. Raises OSError."""
    by = f"{getpass.getuser()} on {socket.gethostname()}"
    (folder / STOP_FILE).write_text(f"{_AT_ONCE if now else _AFTER_STEP} by {by}\n")


def forget_request(folder: Path) -> None:
    """Remove the request that ended an earlier run in the folder."""
    global _request, _at_once, _waits_for_step
    _request, _at_once, _waits_for_step = "", False, False
    with suppress(OSError):
        (folder / STOP_FILE).write_text("")


def obey_request(folder: Path) -> str:
    """Read a new request in a folder, and return a description of its effect, or "". Any thread may call this."""
    global _request, _at_once
    try:
        when, _, by = (folder / STOP_FILE).read_text().strip().partition(" ")
    except OSError:
        return ""
    asked = f"nrl-lite stop{' --now' * (when == _AT_ONCE)} asked for it {by}".strip()
    if not when or asked == _request:
        return ""
    _request, _at_once = asked, when == _AT_ONCE or not _waits_for_step
    if not _at_once:
        return f"{asked}: the run ends after this step, with a checkpoint"
    # Ray replaces the handler of SIGTERM. In Python programs, SIGUSR1 may be unhandled.
    handled = [number for number in (signal.SIGUSR1, signal.SIGINT) if callable(signal.getsignal(number))]
    for number in handled[:1]:
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    return f"{asked}: the run ends at once"


def forget_signals() -> None:
    """Forget signals of an earlier run of this process."""
    _received.clear()


class Stopping:
    """Decides whether a run should end: on a request, or because the next step could exceed its time."""

    def __init__(self, limit_s: float | None, elapsed_s: Callable[[], float]):
        """`limit_s`: value of `elapsed_s` at which the run must have ended (None: no limit)."""
        self._limit_s, self._elapsed_s = limit_s, elapsed_s
        # A signal may have arrived during a restart.
        self._signal: signal.Signals | None = _received[0] if _received else None
        self._signal_at, self._longest_s = time.monotonic(), 0.0
        self._step_started = time.monotonic()

    @contextmanager
    def listening(self, signals: bool = True) -> Iterator[None]:
        """During the block, defer a request and, if `signals`, a first signal to `after_step`. A second signal
        interrupts like Ctrl-C."""
        global _waits_for_step
        previous = {number: signal.signal(number, self._receive) for number in SIGNALS} if signals else {}
        self._step_started, _waits_for_step = time.monotonic(), True
        try:
            yield
        except BaseException:
            _waits_for_step = False
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def after_step(self, save_s: float = 0.0) -> str | None:
        """Return why the run should end, or None. Call it after each step. `save_s`: seconds of a save."""
        now = time.monotonic()
        self._longest_s, self._step_started = max(self._longest_s, now - self._step_started), now
        if self._signal is not None:
            return f"{self._signal.name} was received"
        if _request:
            return _request
        if self._limit_s is not None and self._elapsed_s() + self._longest_s + save_s > self._limit_s:
            return f"another step could end after checkpoint.must_save_by = {self._limit_s:g} s"
        return None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if _at_once:
            raise KeyboardInterrupt
        note_signal(number)
        now = time.monotonic()
        if self._signal is not None:
            if now - self._signal_at < _SAME_REQUEST_S:
                return
            raise KeyboardInterrupt
        self._signal, self._signal_at = signal.Signals(number), now
        message = f"{self._signal.name}: the run ends after this step, with a checkpoint; again to end it at once\n"
        # The signal may have interrupted a stream or a logger, so write directly.
        with suppress(OSError):
            os.write(_STANDARD_ERROR, message.encode())


def seconds(duration: str | int | None) -> float | None:
    """Convert "[[days:]hours:]minutes:seconds", or a number of seconds, to seconds."""
    if duration is None or isinstance(duration, int):
        return duration
    total = 0
    for part, base in zip(reversed(duration.split(":")), (1, 60, 3600, 86400), strict=False):
        total += int(part) * base
    return float(total)
