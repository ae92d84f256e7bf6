"""Who holds the others up: what to say of workers that do not come to an end."""

import time
from collections.abc import Sequence

from nemo_rl_lite.cluster.heartbeat import Beat, last_beats
from nemo_rl_lite.errors import WorkerError


def hang(workers: Sequence[str], phase: str, cause: str) -> WorkerError:
    """The error for workers that are still in `phase`: it names those that the others seem to wait for, and every one's
    stack is in its details."""
    beats, now = last_beats(workers), time.time()
    slowest = laggards(beats, now) or list(workers)
    seen = "; ".join(beat.describe(now) for beat in beats if beat.worker in slowest)
    others = len(workers) - len(slowest)
    waiting = f"; {others} other{'s' if others > 1 else ''} wait{'' if others > 1 else 's'}" if others else ""
    details = "\n\n".join("\n  ".join([beat.describe(now), *beat.stack]) for beat in beats)
    return WorkerError(", ".join(slowest), phase, f"{cause}{waiting}; {seen}" if seen else cause, details=details)


def laggards(beats: Sequence[Beat], now: float) -> list[str]:
    """Those that the others seem to wait for: silent ones, or else those that have done least, or else, of equals,
    those that are not waiting in one of torch's collectives. On GPUs a rank mostly waits where it reads a result, so
    equals are all named."""
    silent = [beat for beat in beats if beat.is_silent(now)]
    # Engines count nothing: how far they are cannot be compared.
    comparable = all(beat.counts for beat in beats)
    least = min((beat.done for beat in beats), default=())
    behind = [beat for beat in beats if beat.done == least] if comparable else list(beats)
    busy = [beat for beat in behind if not beat.waits_for_others]
    return [beat.worker for beat in silent or busy or behind]
