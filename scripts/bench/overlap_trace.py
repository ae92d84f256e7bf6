"""What overlapped moves of optimizer states slow down, from a trace of one step each: overlap_trace.py MODEL

The steps are those of offload_policy.py's table `prepare`, without moves and with overlapped ones. For logprobs and for
training: their seconds, those in which a kernel ran, and the rest, in which the GPU waited for the host or for a copy;
and the small copies, of less than 1 MiB, that the compute stream had. A traced step takes longer than others.
"""

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import offload_policy
import record
import torch
from offload_tables import TABLES

from nemo_rl_lite.run.report.busy import union

SETTINGS = ("states stay", "states leave, page-locked, overlapped")
PHASES = {"score": "logprob", "train": "train"}
STEPS = 4
SMALL = 1 << 20
Event = dict[str, Any]


def main() -> None:
    (model,) = sys.argv[1:]
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"
    os.environ.update(offload_policy.MANY_QUEUES)
    results = []
    for setting in SETTINGS:
        events = traced(model, TABLES["prepare"][setting])
        for phase in PHASES.values():
            for name, (unit, value) in of_phase(phase, events).items():
                results.append(record.result(f"{phase}: {name}", setting, unit, [value]))
                print(f"{setting}, {phase}: {name} {value:.4g} {unit}", flush=True)
        print(record.write("offload-overlap-trace", results, [], "one step each"), flush=True)


def traced(model: str, overrides: list[str]) -> list[Event]:
    """The events of the last step."""
    from nemo_rl_lite.policy.megatron.worker import MegatronWorker

    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA][: 1 + offload_policy.ON_GPU]
    profiler, steps = torch.profiler.profile(activities=kinds, acc_events=True), itertools.count()
    refit, passes = MegatronWorker.prepare_for_refit, {name: getattr(MegatronWorker, name) for name in PHASES}

    def begins(worker: Any, **given: Any) -> None:
        # Before the moves of the step, because the profiler takes long to start.
        if next(steps) == STEPS:
            profiler.start()
        refit(worker, **given)

    def marked(name: str) -> Callable[..., Any]:
        def method(worker: Any, *given: Any) -> Any:
            with torch.profiler.record_function(PHASES[name]):
                result = passes[name](worker, *given)
                if offload_policy.ON_GPU:
                    torch.cuda.synchronize()
            return result

        return method

    MegatronWorker.prepare_for_refit = begins
    for name in PHASES:
        setattr(MegatronWorker, name, marked(name))
    try:
        offload_policy.measure(model, overrides, STEPS, *offload_policy.SHORT)
        profiler.stop()
    finally:
        MegatronWorker.prepare_for_refit = refit
        for name, original in passes.items():
            setattr(MegatronWorker, name, original)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())["traceEvents"]


def of_phase(phase: str, events: Iterable[Event]) -> dict[str, tuple[str, float]]:
    """Quantity -> unit and value."""
    timed = [one for one in events if one.get("ph") == "X"]
    (whole,) = [one for one in timed if one["name"] == phase and one["cat"] == "user_annotation"]
    begin, end = whole["ts"], whole["ts"] + whole["dur"]
    kernels = [one for one in timed if one["cat"] == "kernel" and begin <= one["ts"] <= end]
    streams = {one["args"]["stream"] for one in kernels}
    copies = [one for one in timed if one["cat"] == "gpu_memcpy" and begin <= one["ts"] <= end]
    small = [one for one in copies if one["args"]["bytes"] < SMALL and one["args"]["stream"] in streams]
    busy = sum(until - since for since, until in union((one["ts"], one["ts"] + one["dur"]) for one in kernels))
    return {
        "seconds": ("s", whole["dur"] / 1e6),
        "a kernel runs": ("s", busy / 1e6),
        "no kernel runs": ("s", (whole["dur"] - busy) / 1e6),
        "small copies": ("", float(len(small))),
        "large copies": ("s", sum(one["dur"] for one in copies if one["args"]["bytes"] >= SMALL) / 1e6),
        "longest pause between kernels": ("s", longest_pause(kernels) / 1e6),
    }


def longest_pause(kernels: list[Event]) -> float:
    ordered = itertools.pairwise(sorted(kernels, key=lambda one: one["ts"]))
    return max((after["ts"] - one["ts"] - one["dur"] for one, after in ordered), default=0)


if __name__ == "__main__":
    main()
