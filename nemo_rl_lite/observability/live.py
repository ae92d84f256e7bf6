"""Publish a run's current activity: a thread of the launcher writes live.json, and obeys requests to end."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl_lite.observability.liveness import latest_progress
from nemo_rl_lite.system.engine_count import forget_engines
from nemo_rl_lite.system.stopping import forget_request, obey_request

log = logging.getLogger(__name__)
LIVE_FILE = "live.json"
# Seconds between two polls of requests and activities, and maximum seconds between two writes.
_POLL_S, _WRITTEN_EVERY_S = 2.0, 10.0


class _Activity:
    """A long operation of the launcher, and its progress."""

    def __init__(self, what: str):
        self.what, self.progress, self.since = what, "", time.time()


_activities: list[_Activity] = []


@contextmanager
def doing(what: str) -> Iterator[Callable[[str], None]]:
    """Publish that the block does `what`, with the progress that it reports. The innermost block counts."""
    activity = _Activity(what)

    def tell(progress: str) -> None:
        activity.progress = progress

    _activities.append(activity)
    try:
        yield tell
    finally:
        _activities.remove(activity)


@contextmanager
def shown_to_others(folder: Path) -> Iterator[None]:
    """Keep live.json up to date during the block, and obey requests to end the run."""
    over = threading.Event()
    forget_request(folder)
    forget_engines(folder)
    thread = threading.Thread(target=_show, args=(folder, over), name="live", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _show(folder: Path, over: threading.Event) -> None:
    shown, written = dict[str, Any](), 0.0
    while True:
        ends = over.wait(0 if not shown else _POLL_S)
        if not ends and (happens := obey_request(folder)):
            log.warning(happens)
        now = _state()
        if now != shown or ends or time.monotonic() - written > _WRITTEN_EVERY_S:
            shown, written = now, time.monotonic()
            _write(folder / LIVE_FILE, now | {"at": time.time()})
        if ends:
            return


def _state() -> dict[str, Any]:
    activity = _activities[-1] if _activities else None
    counts = {name: value for name, value in latest_progress().items() if name in ("step", "total")}
    own = {"doing": activity.what, "progress": activity.progress, "since": activity.since} if activity else {}
    return counts | own


def _write(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}")
    try:
        partial.write_text(json.dumps(content) + "\n")
        partial.replace(file)
    except OSError as error:
        log.debug("%s cannot be written: %s", file, error)
