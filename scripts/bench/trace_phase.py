"""What the host and a GPU did in a range of a trace of torch's profiler: kernels, copies, and the host's calls."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from trace_busy import union

SMALL = 1 << 20
# How many of the host's calls are named.
MOST = 4
Event = dict[str, Any]


def of_phase(phase: str, events: Iterable[Event]) -> dict[str, tuple[str, float]]:
    """Quantity -> unit and value, of the one range of that name: its seconds, those in which a kernel ran, and the
    rest, in which the GPU waited for the host or for a copy; copies; and the calls of CUDA on which the threads that
    launch kernels spent most of their time, also during the longest time without a kernel."""
    timed = [one for one in events if one.get("ph") == "X"]
    (whole,) = [one for one in timed if one["name"] == phase and one["cat"] == "user_annotation"]
    begin, end = whole["ts"], whole["ts"] + whole["dur"]
    kernels = [one for one in timed if one["cat"] == "kernel" and begin <= one["ts"] <= end]
    streams = {one["args"]["stream"] for one in kernels}
    copied = [one for one in timed if one["cat"] == "gpu_memcpy" and begin <= one["ts"] <= end]
    small = [one for one in copied if one["args"]["bytes"] < SMALL and one["args"]["stream"] in streams]
    busy_times = union((one["ts"], one["ts"] + one["dur"]) for one in kernels)
    busy = sum(until - since for since, until in busy_times)
    since, until = longest_pause([(begin, begin), *busy_times, (end, end)])
    calls = [one for one in timed if one["cat"] in ("cuda_runtime", "cuda_driver")]
    # The thread of the backward pass is another one; that of the moves launches no kernels.
    launching = {one["tid"] for one in calls if "LaunchKernel" in one["name"]}
    calls = [one for one in calls if one["tid"] in launching]
    return {
        "seconds": ("s", whole["dur"] / 1e6),
        "a kernel runs": ("s", busy / 1e6),
        "no kernel runs": ("s", (whole["dur"] - busy) / 1e6),
        "small copies": ("", float(len(small))),
        "large copies": ("s", sum(one["dur"] for one in copied if one["args"]["bytes"] >= SMALL) / 1e6),
        "longest time without a kernel": ("s", (until - since) / 1e6),
        **{f"host in {name}": ("s", us / 1e6) for name, us in longest_calls(calls, begin, end)},
        **{f"host in {name}, in that pause": ("s", us / 1e6) for name, us in longest_calls(calls, since, until)},
    }


def longest_pause(busy: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """When it began and ended, in us."""
    pauses = ((before[1], after[0]) for before, after in itertools.pairwise(busy))
    return max(pauses, key=lambda pause: pause[1] - pause[0], default=(0, 0))


def longest_calls(calls: Sequence[Event], since: float, until: float) -> list[tuple[str, float]]:
    """The calls that took most of the time between two moments, by name, with us."""
    took = Counter[str]()
    for one in calls:
        took[one["name"]] += max(0, min(until, one["ts"] + one["dur"]) - max(since, one["ts"]))
    return took.most_common(MOST)
