"""What overlapped moves of optimizer states slow down, from a trace of one step each.

overlap_trace.py MODEL [--settings SETTING ...] [--keep FOLDER]

The steps are those of offload_policy.py's table `pieces`, without moves and with overlapped ones. For logprobs and for
training: their seconds, those in which a kernel ran, and the rest, in which the GPU waited for the host or for a copy;
the small copies, of less than 1 MiB, that the compute stream had; the calls of CUDA on which the threads that launch
kernels spent most of their time, and those during the longest time without a kernel. A traced step takes longer than
others, of which the seconds are given, too. `--keep` writes the traces to a folder, for Perfetto or chrome://tracing.
"""

import argparse
import gzip
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import offload_policy
import record
import torch
from offload_tables import PIECES, TABLES
from trace_phase import Event, of_phase

from nemo_rl_lite.offload import copies

SETTINGS = ("states stay", *PIECES)
PHASES = {"score": "logprob", "train": "train"}
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=("states stay", "overlapped, pieces of 128 MiB")
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"
    os.environ.update(offload_policy.MANY_QUEUES)
    results = []
    for setting in given.settings:
        copies.PIECE_BYTES = PIECES.get(setting, copies.PIECE_BYTES)
        seconds, events = traced(given.model, TABLES["pieces"][setting])
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            with gzip.open(given.keep / f"{setting.replace(' ', '-').replace(',', '')}.json.gz", "wt") as file:
                json.dump({"traceEvents": events}, file)
        results += [record.result(f"{name}, not traced", setting, "s", reps) for name, reps in seconds.items()]
        print(setting, {name: [round(one, 3) for one in reps] for name, reps in seconds.items()}, flush=True)
        for phase in PHASES.values():
            for name, (unit, value) in of_phase(phase, events).items():
                results.append(record.result(f"{phase}: {name}", setting, unit, [value]))
                print(f"{setting}, {phase}: {name} {value:.4g} {unit}", flush=True)
        print(record.write("offload-overlap-trace", results, [], "one step each"), flush=True)


def traced(model: str, overrides: list[str]) -> tuple[dict[str, list[float]], list[Event]]:
    """The seconds of the steps before the last one by phase, and the events of the last one."""
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
        measured = offload_policy.measure(model, overrides, STEPS, *offload_policy.SHORT)
        profiler.stop()
    finally:
        MegatronWorker.prepare_for_refit = refit
        for name, original in passes.items():
            setattr(MegatronWorker, name, original)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return {name: measured[name][1][:-1] for name in (*PHASES.values(), "whole step")}, events


if __name__ == "__main__":
    main()
