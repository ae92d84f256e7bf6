"""Measure a run's start by part, from the command to the end of its first step.

start.py MODEL [--gpus 0|1] [--reps N] [--caches cold warm] [--other NAME=PATH:...] [-- OVERRIDE ...]

A start with cold caches compiles all kernels, as on a new machine; one with warm caches follows it and finds them. With
`--caches warm` alone, the caches are those of this machine.
MODEL is a folder, also one with random weights (random_model.py). --gpus 0 starts a small task on CPUs. --other also
starts another checkout, and folders with other packages, as in ways.py. The launcher's parts are sequential. Those of
worker processes, such as generation/warm_up, overlap with them. A record is written after each repetition.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import record
from ways import LARGE
from whole_runs import KNOWN_MODEL, STEP, STEPS_ALONE, model_key, run_in, tried

SETUP = "timing/setup/"
# By the number of GPUs.
TASKS = {
    0: [
        *("generation=vllm", "cluster.cpu_ranks=1", "policy.max_total_sequence_length=96"),
        *("generation.max_new_tokens=16", "algorithm.num_prompts_per_step=4", "policy.train_global_batch_size=16"),
        "algorithm.num_generations_per_prompt=4",
    ],
    1: LARGE,
}
# Caches of compiled kernels: Triton, vLLM, torch, FlashInfer, the driver, and CuTe.
CACHES = (
    *("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"),
    *("CUDA_CACHE_PATH", "CUTE_DSL_CACHE_DIR"),
)
BEGIN, END = "command to the first step", "command to the end of the first step"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", type=int, default=1, choices=TASKS)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--caches", nargs="+", default=["cold", "warm"], choices=("cold", "warm"))
    parser.add_argument("--other", metavar="NAME=PATH:...", help="a checkout, and folders with packages")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    own = [*TASKS[given.gpus], *STEPS_ALONE, "algorithm.max_num_steps=1", model_key(given.model), *given.overrides]
    name, _, paths = (given.other or "").partition("=")
    ways = {f"{name}, ": paths.split(":")} if name else {}
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(given.reps):
        for way, there in (ways | {"": []}).items():
            with tempfile.TemporaryDirectory() as folder:
                caches = {cache: str(Path(folder) / cache) for cache in CACHES}
                for kind in given.caches:
                    parts = start(own, caches if "cold" in given.caches else {}, there)
                    print(f"{way}{kind} caches:", {part: round(value, 1) for part, value in parts.items()}, flush=True)
                    for part, seconds in parts.items():
                        found.setdefault(f"{way}{kind} caches", {}).setdefault(part, []).append(seconds)
        results = [
            record.result(part, kind, "s", reps) for kind, parts in found.items() for part, reps in parts.items()
        ]
        print(record.write("start", results, [], f"model: {given.model.name}"), flush=True)


def start(overrides: Sequence[str], caches: dict[str, str], paths: Sequence[str]) -> dict[str, float]:
    """Run one step with these caches; return seconds by part. `paths`: see `run_in`."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, caches):
        began = time.time()
        first = run_in(Path(folder) / "run", overrides, paths)[0]
        lines = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        setup = {name: value for line in lines for name, value in line.items() if name.startswith(SETUP)}
    ended = first["time"] - began
    parts = {name.removeprefix(SETUP): value for name, value in setup.items()}
    return {BEGIN: ended - first[STEP], END: ended} | parts


def trial() -> None:
    with tried():
        main([KNOWN_MODEL, "--reps", "1", "--other", "before=/before:/packages"])
        main([KNOWN_MODEL, "--gpus", "0", "--reps", "1", "--caches", "warm"])


if __name__ == "__main__":
    record.start(main, trial)
