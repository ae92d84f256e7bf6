"""Measure the bytes and seconds of checkpoints on four policy ranks on CPUs: checkpoint_io.py MODEL

Each layout saves a checkpoint and loads it again, and the second layout also loads the checkpoint of the first. The
policy's processes are those of a run, without Ray. Bytes are those of read and write calls of all ranks and of the
launcher's check (/proc/self/io). A second read of the same bytes counts, also if memory has them. Host memory is a
rank's largest increase while training waits.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
from whole_runs import processes, tiny_model

from nemo_rl_lite.checkpoint.store import POLICY, CheckpointStore, Retention, files_below
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.system.machine import free_port
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import policy_arguments, policy_environment

RANKS, MOST_READ = 4, 1.05
TENSOR = "policy.megatron_cfg.tensor_model_parallel_size=2"
LAYOUTS = {"data 4": [], "data 2 x tensor 2": [TENSOR]}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("NRL_BENCH_OUT")))
    try:
        measure(given.model.resolve(), given.repetitions, folder)
    finally:
        shutil.rmtree(folder)


def measure(model: Path, repetitions: int, folder: Path) -> None:
    results, bars, (first, second) = [], [], LAYOUTS
    for layout, source in ((first, first), (second, second), (second, first)):
        case = layout if layout == source else f"{layout}, from {source}"
        found = [once(model, layout, folder / source, saves=layout == source) for _ in range(repetitions)]
        results += [record.result(name, case, unit, [one[name, unit] for one in found]) for name, unit in found[0]]
        for one in results:
            if one["config"] == case:
                print(case, one["name"], round(one["median"], 3), one["unit"], flush=True)
        if layout == source:
            for name in ("read", "written"):
                reps = [one[name, "x checkpoint"] for one in found]
                bars.append(record.bar(f"{name}, {case}, over the checkpoint's bytes", max(reps), MOST_READ, False))
    record.write("checkpoint-io", results, bars)


def once(model: Path, layout: str, folder: Path, saves: bool) -> dict[tuple[str, str], float]:
    """Save a checkpoint to a folder, if it `saves`, and load the one there. Returns results by name and unit."""
    store = CheckpointStore(folder, Retention(1, 0, None, True))
    found: dict[tuple[str, str], float] = {}
    if saves:
        shutil.rmtree(folder, ignore_errors=True)
        ranks = run(model, layout, save, str(store.begin(1)))
        store.finish(1, {}, {}, {f"{POLICY}/{name}": own for rank in ranks for name, own in rank.pop("parts").items()})
        found["save, training waits", "s"] = max(one["waits"] for one in ranks)
        found["save, whole", "s"] = max(one["whole"] for one in ranks)
        found["host memory of a save", "MiB"] = max(one["memory"] for one in ranks) / 2**20
    size = sum(file.stat().st_size for file in files_below(folder / "step-00000001"))
    if saves:
        found["written", "x checkpoint"] = sum(one["written"] for one in ranks) / size
        found["checkpoint", "MiB"] = size / 2**20
    counter = Counter("rchar")
    newest = store.newest()
    checked = counter.bytes()
    ranks = run(model, layout, load, str(newest.path if newest else folder))
    found["load", "s"] = max(one["seconds"] for one in ranks)
    found["read", "x checkpoint"] = (checked + sum(one["read"] for one in ranks)) / size
    return found


class Counter:
    """Counts bytes of this process: `rchar`, of read calls, or `wchar`, of write calls."""

    def __init__(self, name: str):
        self._name, self._before = name, 0
        self._before = self.bytes()

    def bytes(self) -> int:
        """Return the bytes since the begin."""
        values = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(values[self._name]) - self._before


def peak_bytes() -> int:
    """Return this process's peak resident memory since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run(model: Path, layout: str, method: Callable[..., dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Return what a method gives on each rank of a new policy."""
    context, port = processes(False), str(free_port())
    answers = context.Queue()
    arguments = (port, model, LAYOUTS[layout], method, folder, answers)
    ranks = [context.Process(target=as_rank, args=(rank, *arguments)) for rank in range(RANKS)]
    try:
        for process in ranks:
            process.start()
        return [answers.get(timeout=240) for _ in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def as_rank(rank: int, port: str, model: Path, own: list[str], method: Any, folder: str, answers: Any) -> None:
    ranks = [f"cluster.cpu_ranks={RANKS}", "policy.train_global_batch_size=8", "policy.train_micro_batch_size=1"]
    config = compose_config(["algorithm=sft", f"policy.model_name={model}", "policy.precision=bfloat16", *ranks, *own])
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(policy_environment(config) | {name: str(value) for name, value in place.items()})
    from nemo_rl_lite.policy.worker import MegatronWorker

    worker = MegatronWorker(**policy_arguments(config, model) | {"threads": 1, "resumes": method is load})
    worker.prepare_for_training()
    answers.put(method(worker, folder))
    # A rank that ends early would end the others' connections.
    time.sleep(240)


def save(worker: Any, folder: str) -> dict[str, Any]:
    target = Path(folder) / POLICY
    target.mkdir(exist_ok=True)
    # An optimizer has no states before its first step.
    rows = [TokenRow(list(range(4, 16)), [False] * 4 + [True] * 8)]
    worker.put_batch(rows)
    worker.train(SFTLoss(), SFTLoss().counts(rows * worker.place().data_size))
    forget_peak()
    before, counter, started = peak_bytes(), Counter("wchar"), time.perf_counter()
    worker.begin_save(str(target))
    waits, memory = time.perf_counter() - started, peak_bytes() - before
    parts = worker.finish_save()
    whole = time.perf_counter() - started
    return {"waits": waits, "whole": whole, "memory": memory, "written": counter.bytes(), "parts": parts}


def load(worker: Any, folder: str) -> dict[str, Any]:
    counter, started = Counter("rchar"), time.perf_counter()
    worker.load(str(Path(folder) / POLICY))
    return {"seconds": time.perf_counter() - started, "read": counter.bytes()}


def trial() -> None:
    main([str(tiny_model()), "--repetitions", "1"])


if __name__ == "__main__":
    record.start(main, trial)
