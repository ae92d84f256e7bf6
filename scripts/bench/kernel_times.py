"""Sum the kernels of a GPU in traces of torch's profiler."""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import record

LONGEST, GAPS = 40, 8
# Kernels may follow each other this closely, in microseconds.
TOUCHING = 5


def kernels(traces: Iterable[Path], config: str) -> Iterator[dict[str, Any]]:
    """Yield the seconds and launches of the longest kernels of traces, of all processes together, as results of
    `config`. The idle time between kernels is also given by the kernel before it."""
    seconds, launches, gaps, idle = Counter[str](), Counter[str](), Counter[str](), 0.0
    for file in traces:
        with gzip.open(file) as opened:
            events = json.load(opened)["traceEvents"]
        launched = sorted(filter(_is_kernel, events), key=itemgetter("ts"))
        end, last = launched[0]["ts"] if launched else 0, ""
        for event in launched:
            seconds[event["name"][:160]] += event["dur"] / 1e6
            launches[event["name"][:160]] += 1
            idle += (gap := max(event["ts"] - end, 0) / 1e6)
            if gap > TOUCHING / 1e6:
                gaps[last] += gap
            if event["ts"] + event["dur"] > end:
                end, last = event["ts"] + event["dur"], event["name"][:160]
    if seconds:
        yield record.result("no kernel", config, "s", [idle])
        yield record.result("all kernels", config, "s", [sum(seconds.values())])
        yield record.result("all kernels", config, "launches", [sum(launches.values())])
    for name, value in gaps.most_common(GAPS):
        yield record.result(f"no kernel after {name}", config, "s", [value])
    for name, value in seconds.most_common(LONGEST):
        yield record.result(f"kernel {name}", config, "s", [value])
        yield record.result(f"kernel {name}", config, "launches", [launches[name]])


def _is_kernel(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
