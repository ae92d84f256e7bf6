"""Measure the bytes and seconds of checkpoints on four policy ranks on CPUs, or on GPUs:
checkpoint_io.py MODEL [--gpus N] [--repetitions 3] [--folder FOLDER]

Each layout saves a checkpoint and loads it again, and the second layout also loads the checkpoint of the first. One GPU
has one layout. The first save makes the pinned host memory that later saves use, so its results are separate. The
policy's processes are those of a run, without Ray. Bytes are those of read and write calls of all ranks and of the
launcher's check (/proc/self/io). A second read of the same bytes counts, also if memory has them. Host memory is a
rank's largest increase while training waits. FOLDER holds the checkpoints until the end.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
import torch.distributed as dist
from whole_runs import model_key, processes, tiny_model

from nemo_rl_lite.checkpoint.store import POLICY, CheckpointStore, Retention, files_below
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.refit.group import all_gather
from nemo_rl_lite.system.machine import free_port
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import policy_arguments, policy_environment

CPU_RANKS, MOST_READ = 4, 1.05
TENSOR = "policy.megatron_cfg.tensor_model_parallel_size=2"
SECONDS, BYTES = ("save, training waits", "save, whole", "load"), ("read", "written")
MEMORY, OF_SIZE = "host memory of a save", "x checkpoint"


@dataclass(frozen=True)
class Ranks:
    """The ranks of a policy, on GPUs or CPUs, and its layouts."""

    count: int
    on_gpus: bool

    @property
    def layouts(self) -> dict[str, list[str]]:
        whole: dict[str, list[str]] = {f"data {self.count}": []}
        return whole if self.count == 1 else whole | {f"data {self.count // 2} x tensor 2": [TENSOR]}

    @property
    def overrides(self) -> list[str]:
        return [f"cluster.gpus_per_node={self.count}"] if self.on_gpus else [f"cluster.cpu_ranks={self.count}"]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=os.environ.get("NRL_BENCH_OUT"))
    given = parser.parse_args(arguments)
    if given.gpus > 1 and given.gpus % 2:
        parser.error("--gpus: 1, or an even number, for tensor parallel 2")
    if given.folder is not None:
        Path(given.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        measure(given.model.resolve(), Ranks(given.gpus or CPU_RANKS, given.gpus > 0), given.repetitions, Path(folder))


def measure(model: Path, ranks: Ranks, repetitions: int, folder: Path) -> None:
    results, bars, layouts = [], [], list(ranks.layouts)
    for layout, source in [*zip(layouts, layouts, strict=True), *zip(layouts[1:], layouts, strict=False)]:
        case = layout if layout == source else f"{layout}, from {source}"
        store = CheckpointStore(folder / source, Retention(1, 0, None, True))
        of_ranks = run(model, ranks, layout, store, repetitions, layout == source)
        found = [combined(reps, store) for reps in zip(*of_ranks, strict=True)]
        values: dict[tuple[str, str], list[float]] = {}
        for number, one in enumerate(found):
            for (name, unit), value in one.items():
                key = (name if number else name.replace("save", "first save"), unit)
                values.setdefault(key, []).append(value)
        results += [record.result(name, case, unit, reps) for (name, unit), reps in values.items()]
        for one in results:
            if one["config"] == case:
                print(case, one["name"], round(one["median"], 3), one["unit"], flush=True)
        for name in BYTES if layout == source else ("read",):
            most = max(one[name, OF_SIZE] for one in found)
            bars.append(record.bar(f"{name}, {case}, over the checkpoint's bytes", most, MOST_READ, False))
    record.write("checkpoint-io", results, bars)


def combined(ranks: Sequence[dict[str, float]], store: CheckpointStore) -> dict[tuple[str, str], float]:
    """Return the results of a repetition by name and unit: the largest of all ranks, and their bytes added up."""
    size = sum(file.stat().st_size for file in files_below(store.folder / "step-00000001"))
    seconds = {(name, "s"): max(rank[name] for rank in ranks) for name in ranks[0] if name in SECONDS}
    seconds |= {(f"{name}, of 100 GB at this rate", "s"): own * 1e11 / size for (name, _), own in seconds.items()}
    nbytes = {(name, OF_SIZE): sum(rank[name] for rank in ranks) / size for name in ranks[0] if name in BYTES}
    memory = {(name, "MiB"): max(rank[name] for rank in ranks) / 2**20 for name in ranks[0] if name == MEMORY}
    return {**seconds, **memory, ("checkpoint", "MiB"): size / 2**20, **nbytes}


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


def run(
    model: Path, ranks: Ranks, layout: str, store: CheckpointStore, repetitions: int, saves: bool
) -> list[list[dict[str, float]]]:
    """Return what each rank of a new policy measures in each repetition of a load, after a save if it `saves`."""
    context, port = processes(ranks.on_gpus), str(free_port())
    answers = context.Queue()
    arguments = (port, model, ranks, ranks.layouts[layout], store, repetitions, saves, answers)
    begun = [context.Process(target=as_rank, args=(rank, *arguments)) for rank in range(ranks.count)]
    try:
        for process in begun:
            process.start()
        return [answers.get(timeout=280) for _ in begun]
    finally:
        for process in begun:
            process.kill()
            process.join()


def as_rank(
    rank: int,
    port: str,
    model: Path,
    ranks: Ranks,
    own: list[str],
    store: CheckpointStore,
    repetitions: int,
    saves: bool,
    answers: Any,
) -> None:
    batch = ["policy.train_global_batch_size=8", "policy.train_micro_batch_size=1", "policy.precision=bfloat16"]
    config = compose_config(["algorithm=sft", model_key(model), *batch, *ranks.overrides, *own])
    place = {"RANK": rank, "WORLD_SIZE": ranks.count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": rank} if ranks.on_gpus else {"LOCAL_RANK": rank}
    os.environ.update(policy_environment(config) | {name: str(value) for name, value in place.items()})
    from nemo_rl_lite.policy.worker import MegatronWorker

    threads = {} if ranks.on_gpus else {"threads": 1}
    worker = MegatronWorker(**policy_arguments(config, model) | threads | {"resumes": not saves})
    worker.prepare_for_training()
    # An optimizer has no states before its first step.
    rows = [TokenRow(list(range(4, 16)), [False] * 4 + [True] * 8)]
    worker.put_batch(rows)
    worker.train(SFTLoss(), SFTLoss().counts(rows * worker.place().data_size))
    found = []
    for _ in range(repetitions):
        found.append((save(worker, store, rank) if saves else {}) | load(worker, store, rank))
    answers.put(found)
    # A rank that ends early would end the others' connections.
    time.sleep(280)


def save(worker: Any, store: CheckpointStore, rank: int) -> dict[str, float]:
    target = store.folder / ".step-00000001" / POLICY
    if rank == 0:
        (store.begin(1) / POLICY).mkdir()
    dist.barrier()
    forget_peak()
    before, counter, started = peak_bytes(), Counter("wchar"), time.perf_counter()
    worker.begin_save(str(target))
    waits, memory = time.perf_counter() - started, peak_bytes() - before
    parts = worker.finish_save()
    whole, written = time.perf_counter() - started, counter.bytes()
    everyone = all_gather(parts)
    if rank == 0:
        store.finish(1, {}, {}, {f"{POLICY}/{name}": own for one in everyone for name, own in one.items()})
    dist.barrier()
    return {"save, training waits": waits, "save, whole": whole, MEMORY: memory, "written": written}


def load(worker: Any, store: CheckpointStore, rank: int) -> dict[str, float]:
    counter = Counter("rchar")
    if rank == 0:
        # As the launcher does.
        store.newest()
    dist.barrier()
    started = time.perf_counter()
    worker.load(str(store.folder / "step-00000001" / POLICY))
    return {"load": time.perf_counter() - started, "read": counter.bytes()}


def trial() -> None:
    main([str(tiny_model()), "--repetitions", "1"])


if __name__ == "__main__":
    record.start(main, trial)
