"""Compare whole refits with the same steps without overlap and with vLLM's own transfer, in one run.

refit.py apart MODEL [--nemo-rl CHECKOUT] [OVERRIDE ...]    policy on GPU 0, engine on GPU 1: broadcast
refit.py shared MODEL [OVERRIDE ...]                        both on GPU 0: a shared buffer, and direct copies

A policy rank and an engine run in separate processes, without Ray. A repetition is the time from the command to both
until both are done, devices included. With `--nemo-rl` the packed transfer is that of a checkout of NeMo-RL
(nemo_rl/utils/packed_tensor.py) instead of vLLM's. On CPUs only what the engine can do there is run.
"""

import argparse
import importlib
import importlib.util
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import record
import torch
from whole_runs import processes, tiny_model

from nemo_rl_lite.config.schema import Config, RefitConfig
from nemo_rl_lite.refit.engine import EngineLoader, Source
from nemo_rl_lite.refit.group import Rendezvous
from nemo_rl_lite.system.machine import free_port
from nemo_rl_lite.validation.compose import compose_config

ON_GPU = torch.cuda.device_count() > 0
REPETITIONS, WARM_UP = 5, 2
RAW_BYTES, RAW_REPETITIONS = 2**30 if ON_GPU else 2**22, 10
HOST = "127.0.0.1"
GPU = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=2", "generation.colocated.enabled=false"]
GPU += ["generation.colocated.resources.gpus_per_node=1", "generation.vllm_cfg.enforce_eager=true"]
SHARED = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1"]
BUCKETS = {"256 MB": 256 * 10**6, "1 GB": 10**9} if ON_GPU else {"300 kB": 300_000, "1 MB": 10**6}


class Side:
    """The common part of both processes. `plan`, `group` and `buffers` are those of the connection."""

    rank: int
    plan: Any
    group: Any
    buffers: Any

    def wire(self) -> dict[str, float]:
        """Transfer all buckets' bytes without packing or loading."""
        flights = []
        for index, bucket in enumerate(self.plan.buckets):
            buffer = self.buffers[index % len(self.buffers), : bucket.nbytes]
            flights.append(self.group.start(buffer, "a bucket"))
        for flight in flights:
            flight.finish()
        return {}

    def raw(self) -> list[float]:
        """Return the GB/s of repeated large broadcasts."""
        buffer, rates = torch.zeros(RAW_BYTES, dtype=torch.uint8, device=self.group.device), []
        for _ in range(RAW_REPETITIONS + WARM_UP):
            synchronize()
            started = time.perf_counter()
            self.group.broadcast(buffer, "raw bytes")
            synchronize()
            rates.append(RAW_BYTES / (time.perf_counter() - started) / 1e9)
        return rates[WARM_UP:]

    def packed_join(self, port: int, nemo_rl: Path | None) -> None:
        """Join the group of the packed transfer: NeMo-RL's, or without a checkout of it vLLM's."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._transfer: ModuleType = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
        if nemo_rl:
            file = nemo_rl / "nemo_rl" / "utils" / "packed_tensor.py"
            spec = importlib.util.spec_from_file_location("nemo_rl_packed_tensor", file)
            self._transfer = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self._transfer)
        self._packed = NCCLWeightTransferEngine._stateless_init_process_group(HOST, port, self.rank, 2, 0)


class PolicySide(Side):
    """The policy's process."""

    rank = 0

    def __init__(self, config: Config, model: str):
        from nemo_rl_lite.policy.model import build_model

        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST}
        os.environ.update(place | {"MASTER_PORT": str(free_port())})
        cluster = config.cluster
        self.model, self._tasks = build_model(config.policy, model, ON_GPU, cluster.collective_timeout_s, seed=0), None

    def open(self, config: RefitConfig, shared: bool, by_the_bridge: bool) -> Any:
        from nemo_rl_lite.policy import export

        # The buffers of the connection before make room.
        self.producer = self.opened = self.sender = self.buffers = None
        unlike = export.FoundExport({}, {}, "everything, by request,")
        with patch.object(export, "find_export", lambda *given: unlike) if by_the_bridge else nullcontext():
            self.producer = export.plan_refit(self.model, config, shared, consumers=1)
            self.opened = self.producer.open(HOST)
        self.plan = self.producer.plan
        return self.plan, self.opened[0].port, self.opened[1]

    def join(self) -> None:
        self.sender = self.producer.join(*self.opened, consumers=1)
        self.group, self.buffers = side_of(self.sender)

    def ours(self) -> dict[str, float]:
        return self.sender.send().seconds

    loader = ours

    def serial(self) -> dict[str, float]:
        for name, tensor in self._exported():
            self.group.start(tensor.contiguous(), name)._work.wait()
        return {}

    def packed(self) -> dict[str, float]:
        send = _of(self._transfer, "packed_nccl_broadcast_producer", "packed_broadcast_producer")
        send(iter(self._exported()), self._packed, 0, lambda item: item[1])
        return {}

    def _exported(self) -> Any:
        from nemo_rl_lite.policy.export import export_weights

        if self._tasks is None:
            self._tasks = self.model.bridge.get_conversion_tasks(self.model.chunks)
        return export_weights(self.model, self._tasks)


class EngineSide(Side):
    """The engine's process."""

    rank = 1

    def __init__(self, config: Config, model: str):
        from nemo_rl_lite.config.engines import engine_of

        own = engine_of(config)
        os.environ.update(own.environment(config.generation, ON_GPU))
        module, _, name = own.worker.rpartition(".")
        engine_class = getattr(importlib.import_module(module), name)
        self.engine = engine_class(config.generation, config.policy, model, seed=0, on_gpu=ON_GPU)
        # Of vLLM, the rank in this process; the reference engine has no ranks.
        vllm = getattr(self.engine, "_engine", None)
        self.rank_of_engine = vllm.collective_rpc(lambda worker: [worker])[0][0] if vllm else self.engine
        self._refits = 0

    def join(self, source: Source) -> None:
        self.engine.join_refit([source])
        self.plan = source.plan
        self.group, self.buffers = side_of(self.rank_of_engine._receiver)

    def ours(self) -> dict[str, float]:
        self._refits += 1
        return self.engine.receive_weights(self._refits)[0].seconds

    def loader(self) -> dict[str, float]:
        """With the model's own loader each time."""
        loader = EngineLoader(self.rank_of_engine.model_runner.get_model().load_weights)
        return self.rank_of_engine._receiver.receive(loader).seconds

    def serial(self) -> dict[str, float]:
        model = self.rank_of_engine.model_runner.get_model()
        for name, shape, dtype in self._expected():
            tensor = torch.empty(shape, dtype=dtype, device=self.group.device)
            self.group.start(tensor, name)._work.wait()
            model.load_weights([(name, tensor)])
        return {}

    def packed(self) -> dict[str, float]:
        receive = _of(self._transfer, "packed_nccl_broadcast_consumer", "packed_broadcast_consumer")
        expected = ((name, (list(shape), dtype)) for name, shape, dtype in self._expected())
        load = self.rank_of_engine.model_runner.get_model().load_weights
        receive(expected, self._packed, 0, load)
        return {}

    def _expected(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        slots = (slot for bucket in self.plan.buckets for slot in bucket.slots)
        return [(slot.name, slot.shape, getattr(torch, slot.dtype)) for slot in slots]


def _of(module: ModuleType, *names: str) -> Any:
    """Return the function that has one of the names there."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def side_of(side: Any) -> tuple[Any, Any]:
    """The group of a sender or a receiver, and its buffers, if it has any."""
    channel = getattr(side, "_channel", None)
    return (side._group, None) if channel is None else (channel.groups[0], channel.memory)


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def serve(side: type, environment: dict[str, str], connection: Any) -> None:
    """Serve calls in a process: they come as (method, arguments), answers go as (result, None) or (None, error)."""
    os.environ.update(environment)
    made: Any = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            # The parent has closed the connection.
            return
        try:
            if method == "make":
                made, result = side(*arguments), None
            else:
                result = getattr(made, method)(*arguments)
                synchronize()
            connection.send((result, None))
        except Exception as error:
            connection.send((None, f"{side.__name__}.{method}: {type(error).__name__}: {error}"))


SIDES = (PolicySide, EngineSide)


class Pair:
    """Both processes."""

    def __init__(self, shared: bool):
        context = processes(ON_GPU)
        self._pipes, self._processes, self.shared = [], [], shared
        for index, side in enumerate(SIDES):
            ours, theirs = context.Pipe()
            device = {"CUDA_VISIBLE_DEVICES": str(0 if shared else index)} if ON_GPU else {}
            environment = device | {
                "CUDA_DEVICE_MAX_CONNECTIONS": "32",
                "TORCH_COMPILE_DISABLE": "0" if ON_GPU else "1",
            }
            process = context.Process(target=serve, args=(side, environment, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._ends = [process.sentinel for process in self._processes]

    def both(self, method: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self._answers(0, 1)

    def one(self, side: int, method: str, *arguments: Any) -> Any:
        self._pipes[side].send((method, arguments))
        return self._answers(side)[0]

    def connect(self, config: RefitConfig, by_the_bridge: bool = False) -> int:
        """With these settings from now on, and where it is said with megatron-bridge's export at each refit; bytes of a
        refit."""
        plan, port, offer = self.one(0, "open", config, self.shared, by_the_bridge)
        self._pipes[0].send(("join", ()))
        self._pipes[1].send(("join", (Source(plan, config, Rendezvous(HOST, port, 1, 2), offer),)))
        self._answers(0, 1)
        return plan.nbytes

    def times(self, method: str) -> tuple[list[float], dict[str, list[float]]]:
        """Return the seconds of each repetition, and of each stage as the two sides measured it."""
        whole, stages = [], dict[str, list[float]]()
        for repetition in range(WARM_UP + REPETITIONS):
            started = time.perf_counter()
            sides = self.both(method)
            seconds = time.perf_counter() - started
            if repetition < WARM_UP:
                continue
            whole.append(seconds)
            for side, seen in zip(("producer", "consumer"), sides, strict=True):
                for stage, value in seen.items():
                    stages.setdefault(f"{side}, {stage}", []).append(value)
        return whole, stages

    def _answers(self, *sides: int) -> list[Any]:
        """Return the sides' answers. The first error ends the script at once: the other side waits for a side that
        failed until the limit of a refit is over, and its own error would hide the cause."""
        answers: dict[int, Any] = {}
        while waiting := {self._pipes[side]: side for side in sides if side not in answers}:
            for pipe in wait([*waiting, *self._ends]):
                if pipe not in waiting:
                    index = self._ends.index(pipe)
                    if self._pipes[index].poll():
                        continue
                    self.close()
                    sys.exit(f"{SIDES[index].__name__}: its process ended, see its output")
                result, error = pipe.recv()
                if error:
                    self.close()
                    sys.exit(error)
                answers[waiting[pipe]] = result
        return [answers[side] for side in sides]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=("apart", "shared"))
    parser.add_argument("model")
    parser.add_argument("--nemo-rl", type=Path, metavar="CHECKOUT")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    shared, model = given.where == "shared", given.model
    layout = (SHARED if shared else GPU) if ON_GPU else []
    config = compose_config([f"policy.model_name={model}", *layout, *given.overrides])
    pair = Pair(shared)
    try:
        measure(pair, config, given)
    finally:
        pair.close()


def measure(pair: Pair, config: Config, given: argparse.Namespace) -> None:
    """Measure all settings, and write the record."""
    shared, model = pair.shared, given.model
    if shared:
        # The engine starts first, because it measures the free memory of the GPU.
        pair.one(1, "make", config, model)
        pair.one(0, "make", config, model)
    else:
        pair.both("make", config, model)
    results, medians = [], {}

    def keep(name: str, setting: str, unit: str, values: list[float]) -> None:
        one = record.result(name, setting, unit, values)
        results.append(one)
        medians[name, setting] = one["median"]
        sys.stderr.write(f"{setting}: {name}: {one['median']:.4g} {unit}\n")

    def keep_stages(setting: str) -> None:
        whole, stages = pair.times("ours")
        keep("refit time", setting, "s", whole)
        for stage, values in stages.items():
            keep(stage, setting, "s", values)

    base = replace(config.refit, verify="off", cuda_ipc=False)
    for bucket, size in BUCKETS.items():
        for count in (2,) if shared else (1, 2, 3):
            setting = f"{bucket} buckets, {count} buffers"
            nbytes = pair.connect(replace(base, bucket_bytes=size, num_buffers=count))
            keep_stages(setting)
            if not shared:
                keep("transfer alone", setting, "GB/s", [nbytes / 1e9 / one for one in pair.times("wire")[0]])
    direct, peer = shared and ON_GPU, "NeMo-RL" if given.nemo_rl else "vLLM"
    if direct:
        setting = "direct"
        pair.connect(replace(base, bucket_bytes=size, cuda_ipc=True))
        keep_stages(setting)
    for verify in ("sample", "full"):
        setting = "direct" if direct else f"{bucket} buckets, 2 buffers"
        pair.connect(replace(base, bucket_bytes=size, verify=verify, cuda_ipc=direct))
        keep("refit time", f"{setting}, verify={verify}", "s", pair.times("ours")[0])
    pair.connect(replace(base, bucket_bytes=size), by_the_bridge=True)
    if ON_GPU:
        keep("refit time", "bridge's export and the engine's loader", "s", pair.times("loader")[0])
    if not shared:
        keep("repeated raw broadcast", f"{RAW_BYTES} bytes", "GB/s", pair.both("raw")[0])
    if ON_GPU and not shared:
        keep("refit time", "tensor by tensor, sequential", "s", pair.times("serial")[0])
        pair.both("packed_join", free_port(), given.nemo_rl)
        keep("refit time", f"{peer}'s packed transfer", "s", pair.times("packed")[0])
    keep("bytes of a refit", setting, "GB", [nbytes / 1e9])
    found = bars(medians, nbytes / 1e9, None if shared else peer) if ON_GPU else []
    name = f"refit-{'nemo-' if given.nemo_rl else ''}{given.where}-{Path(model).name}"
    sys.stdout.write(record.write(name, results, found).read_text())


def bars(medians: dict[tuple[str, str], float], gigabytes: float, peer: str | None) -> list[dict]:
    """Return the bars; `peer`: whose packed transfer was measured, None where both sides share a GPU."""
    whole = {setting: value for (name, setting), value in medians.items() if name == "refit time"}
    plain = {setting: value for setting, value in whole.items() if setting.endswith(("buffers", "direct"))}
    best = min(plain.values())
    loader = whole["bridge's export and the engine's loader"]
    if peer is None:
        return [
            record.bar("whole refit, s", best, 0.15, at_least=False),
            record.bar("refit rate, GB/s", gigabytes / best, 400, at_least=True),
            record.bar("times faster than export and loader", loader / best, 3, at_least=True),
        ]
    serial = whole["tensor by tensor, sequential"]
    raw = medians["repeated raw broadcast", f"{RAW_BYTES} bytes"]
    wire = max(value for (name, _), value in medians.items() if name == "transfer alone")
    packed = whole[f"{peer}'s packed transfer"]
    return [
        record.bar("times faster than the same steps one after the other", serial / best, 2.4, at_least=True),
        record.bar("transfer alone, share of the raw rate", wire / raw, 0.90, at_least=True),
        record.bar("whole refit, share of the raw rate", gigabytes / best / raw, 0.50, at_least=True),
        record.bar(f"times faster than {peer}'s packed transfer", packed / best, 1, at_least=True),
    ]


def trial() -> None:
    """Refit a reference engine from a policy rank over gloo, and see an engine's error at once."""
    tiny = ["generation=transformers", "policy.max_total_sequence_length=32", "refit.timeout_s=60"]
    main(["apart", str(tiny_model()), *tiny])


if __name__ == "__main__":
    record.start(main, trial)
