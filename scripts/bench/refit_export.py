"""Fill all buckets of a refit from a policy that is spread over ranks: megatron-bridge's export against the copies
found by tracing it once, alternating in one run.

refit_export.py MODEL [LAYOUT ...] [OVERRIDE ...]     LAYOUT: tp2, pp2, tp2-pp2, ep2; tp2 and pp2 where none is given

Nothing is sent to engines. Buckets are filled on all ranks, as for engines on every rank's device, or on the first
rank, as for a broadcast. The seconds are those of the slowest rank, devices included.
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist

from nemo_rl_lite.host.machine import free_port
from nemo_rl_lite.refit.layout.packing import buffer_of, new_buffers
from nemo_rl_lite.refit.transport.assembly import assemble
from nemo_rl_lite.refit.transport.export import Stream
from nemo_rl_lite.refit.transport.report import RefitReport
from nemo_rl_lite.rules.compose import compose_config

ON_GPU = torch.cuda.device_count() > 0
REPETITIONS, WARM_UP = 5, 1
SIZES = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


class Rank:
    """One rank's producer and its measurements."""

    def __init__(self, model: str, overrides: list[str]):
        from nemo_rl_lite.policy.megatron.export_recipe import find_export
        from nemo_rl_lite.policy.megatron.model import build_model
        from nemo_rl_lite.policy.megatron.producer import plan_refit

        config = compose_config([f"policy.model_name={model}", *overrides])
        timeout_s = config.cluster.collective_timeout_s
        self._model = build_model(config.policy, model, ON_GPU, timeout_s, seed=0)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        started = time.perf_counter()
        self.plan = plan_refit(self._model, config.refit, shared_device=True, consumers=0).plan
        self._found = find_export(self._model, self.plan)
        self.planning = time.perf_counter() - started
        self._buffers = new_buffers(self.plan, 2, self._model.device)

    def measure(self, wanting: list[int]) -> dict[str, list[float]]:
        """Seconds by way."""
        from nemo_rl_lite.policy.megatron.export_recipe import export_weights

        found = self._found
        if found.unlike is not None:
            sys.exit("megatron-bridge exports this model at each refit")
        wants = self.rank in wanting
        recipe = found.recipe if wants else None
        assembly = assemble(self.plan, found.parameters, recipe, self._model.device, [], 600)

        def ours() -> None:
            if assembly is not None:
                self._fill(assembly, wants)

        tasks = self._model.bridge.get_conversion_tasks(self._model.chunks)
        stream = Stream(self.plan, lambda: export_weights(self._model, tasks), gathers=True)

        def bridge() -> None:
            self._fill(stream, wants)

        seconds: dict[str, list[float]] = {"megatron-bridge's export": [], "found once": []}
        for repetition in range(WARM_UP + REPETITIONS):
            for way, values in zip((bridge, ours), seconds.values(), strict=True):
                taken = self._timed(way)
                if repetition >= WARM_UP:
                    values.append(taken)
        return seconds | {"collectives": [assembly.collectives if assembly is not None else 0]}

    def _fill(self, export: Any, wants: bool) -> None:
        report = RefitReport()
        export.start()
        if not wants:
            export.finish(lambda index: None)
            return
        for index in range(len(self.plan.buckets)):
            export.begin(index, report)
            export.fill(index, buffer_of(self.plan, self._buffers, index), report)

    def _timed(self, way: Any) -> float:
        dist.barrier()
        started = time.perf_counter()
        way()
        if ON_GPU:
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - started, device=self._model.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()


def rank_main(place: dict[str, str], model: str, overrides: list[str], answers: Any) -> None:
    os.environ.update(place)
    if not ON_GPU:
        torch.set_num_threads(1)
    rank = Rank(model, overrides)
    measured = {"all ranks": rank.measure(list(range(rank.ranks))), "the first rank": rank.measure([0])}
    if rank.rank == 0:
        tensors = sum(len(bucket.slots) for bucket in rank.plan.buckets)
        answers.put((measured, rank.planning, tensors, rank.plan.nbytes, len(rank.plan.buckets)))
    dist.barrier()


def main(model: str, *arguments: str) -> None:
    overrides = [one for one in arguments if "=" in one]
    layouts = [one for one in arguments if "=" not in one] or ["tp2", "pp2"]
    results, bars = [], []
    for layout in layouts:
        sizes = {one[:2]: int(one[2:]) for one in layout.split("-")}
        measured, planning, tensors, nbytes, buckets = _run(model, sizes, overrides)
        for wanting, seconds in measured.items():
            setting = f"{layout}, {wanting}"
            (collectives,) = seconds.pop("collectives")
            medians = []
            for way, values in seconds.items():
                results.append(record.result("export", f"{setting}: {way}", "s", values))
                medians.append(results[-1]["median"])
                sys.stderr.write(f"{setting}: {way}: {medians[-1]:.4g} s\n")
            results.append(record.result("collectives of an export", setting, "", [collectives]))
            bars.append(record.bar(f"{setting}, times faster", medians[0] / medians[1], 1, at_least=True))
        results.append(record.result("laying out and finding, once", layout, "s", [planning]))
        results.append(record.result("tensors", layout, "", [tensors]))
        results.append(record.result("buckets", layout, "", [buckets]))
        results.append(record.result("bytes", layout, "GB", [nbytes / 1e9]))
    sys.stdout.write(record.write(f"refit-export-{Path(model).name}", results, bars).read_text())


def _run(model: str, sizes: dict[str, int], overrides: list[str]) -> Any:
    ranks = torch.Size([size for name, size in sizes.items() if name != "ep"]).numel()
    ranks = max(ranks, sizes.get("ep", 1))
    spawn = multiprocessing.get_context("spawn")
    answers, port = spawn.Queue(), str(free_port())
    layout = [f"policy.megatron_cfg.{SIZES[name]}_model_parallel_size={size}" for name, size in sizes.items()]
    layout += ["policy=megatron_gpu", f"cluster.gpus_per_node={ranks}"] if ON_GPU else [f"cluster.cpu_ranks={ranks}"]
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        place |= {"CUDA_VISIBLE_DEVICES": rank} if ON_GPU else {"TORCH_COMPILE_DISABLE": 1}
        own = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        processes.append(
            spawn.Process(target=rank_main, args=(own, model, [*layout, *overrides], answers), daemon=True)
        )
        processes[-1].start()
    while answers.empty():
        if any(process.exitcode for process in processes):
            sys.exit("a rank ended with an error")
        time.sleep(0.1)
    answer = answers.get()
    for process in processes:
        process.join()
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
