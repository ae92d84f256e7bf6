"""Measure what each offload feature costs and saves in the policy's phases: offload_policy.py MODEL [TABLE ...]

This process is one policy rank, without an engine. Each setting goes through the phases of several GRPO steps on the
same random sequences, 64 of 558 tokens, or 4 of 8192 for activations; the first step is left out. TABLEs: prepare,
activations, cpu_optimizer (the default three); pieces, of overlapped copies; and, for a model with experts,
activations_of_experts.
"""

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist
from offload_tables import PIECES, TABLES

from nemo_rl_lite.config.sections.algorithm import GRPOConfig
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.host.ports import free_port
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.offload import copies
from nemo_rl_lite.offload.mover import move_metrics
from nemo_rl_lite.rules.compose import compose_config
from nemo_rl_lite.run.workers.environment import MANY_QUEUES
from nemo_rl_lite.run.workers.reserve import policy_arguments

ON_GPU = torch.cuda.is_available()
PROMPT = 46
COMMON = [
    "algorithm.loss_fn.reference_policy_kl_penalty=0",
    "algorithm.num_prompts_per_step=1",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    "cluster.collective_timeout_s=120",
]
GPU = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "checkpoint.save_period=0"]
PACKED = [f"policy.sequence_packing.{phase}_mb_tokens=8192" for phase in ("train", "logprob")]
STEPS = {"prepare": 4, "pieces": 6, "activations": 3, "activations_of_experts": 3, "cpu_optimizer": 3}
SHORT, LONG = (64, 558), (4, 8192)
USUAL = copies.PIECE_BYTES


def main() -> None:
    model, *tables = sys.argv[1:]
    # Transformer Engine reads this while it is imported; without offloaded activations it changes nothing.
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"
    os.environ.update(MANY_QUEUES)
    for table in tables or ("prepare", "activations", "cpu_optimizer"):
        results, medians, failed = [], {}, []
        sequences = LONG if table.startswith("activations") else SHORT
        for setting, overrides in TABLES[table].items():
            started = time.time()
            copies.PIECE_BYTES = PIECES.get(setting, USUAL)
            try:
                measured = measure(model, overrides, STEPS[table], *sequences)
            except (RuntimeError, LauncherError) as error:
                # A setting that fails is a result as well, and the others must still run.
                failed.append(f"{setting}: {type(error).__name__}: {str(error).splitlines()[0]}")
                print(f"{table}, {failed[-1]}", flush=True)
                forget()
                continue
            medians[setting] = {name: statistics.median(reps) for name, (_, reps) in measured.items()}
            results += [record.result(name, setting, unit, reps) for name, (unit, reps) in measured.items()]
            shown = {name: round(value, 3) for name, value in medians[setting].items()}
            print(f"{table}, {setting}: {time.time() - started:.0f} s: {shown}", flush=True)
            note = f"Did not run: {'; '.join(failed)}" if failed else None
            record.write(f"offload-{table.replace('_', '-')}", results, bars(table, medians), note)


def measure(
    model: str, overrides: list[str], steps: int, count: int, length: int
) -> dict[str, tuple[str, list[float]]]:
    """Return name -> unit and one value for each step."""
    from nemo_rl_lite.policy.megatron.worker import MegatronWorker

    length = length if ON_GPU else 30
    sizes = [
        f"policy.train_global_batch_size={count}",
        f"algorithm.num_generations_per_prompt={count}",
        f"policy.train_micro_batch_size={count // 2}",
        f"policy.max_total_sequence_length={max(length, 128)}",
    ]
    layout = GPU + PACKED if ON_GPU else []
    config = compose_config([f"policy.model_name={model}", *COMMON, *sizes, *layout, *overrides])
    for name, value in place().items():
        os.environ[name] = value
    worker = MegatronWorker(**policy_arguments(config, Path(model)))
    try:
        return steps_of(worker, GRPOLoss(config.options(GRPOConfig).loss_fn), steps, count, length)
    finally:
        empty(worker)
        del worker
        forget()


def steps_of(worker: Any, loss: GRPOLoss, steps: int, count: int, length: int) -> dict[str, tuple[str, list[float]]]:
    rows, collected = random_rows(count, length), {}
    counts = loss.counts(rows)
    for step in range(steps + 1):
        times: dict[str, float] = {}
        _synchronize()
        began = time.perf_counter()
        with timed(times, "refit preparation"):
            worker.prepare_for_refit(engine_bytes=0)
        with timed(times, "generation preparation"):
            worker.prepare_for_generation()
        with timed(times, "logprob preparation"):
            worker.prepare_for_logprob()
        with timed(times, "logprob"):
            worker.hold(rows)
            worker.score(("previous",), counts)
        with timed(times, "training preparation"):
            worker.prepare_for_training()
        with timed(times, "train"):
            trained, _ = worker.train(loss, counts)
        _synchronize()
        times["whole step"] = time.perf_counter() - began
        values = {name: ("s", value) for name, value in times.items()}
        values["logprob and training preparation"] = (
            "s",
            times["logprob preparation"] + times["training preparation"],
        )
        moves: dict[str, list] = {}
        for name, move in worker.take_moves():
            moves.setdefault(name, []).append(move)
        for name, (move, *_) in moves.items():
            for metric, value in move_metrics({name: move}).items():
                values[metric] = (unit_of(metric), value)
        for name, value in worker.take_memory().items():
            values[name] = ("GiB", value / 2**30)
        values["gradient norm"] = ("", trained["grad_norm"])
        if step:
            for name, (unit, value) in values.items():
                collected.setdefault(name, (unit, []))[1].append(value)
    return collected


def empty(worker: Any) -> None:
    """Free the model's memory by hand, because megatron-core's hooks keep the model alive."""
    from nemo_rl_lite.offload.optimizer_states import optimizer_tensors
    from nemo_rl_lite.policy.megatron.memory import torch_optimizers

    gradients = [buffer.grad_data for chunk in worker._model.chunks for buffer in chunk.expert_parallel_buffers]
    gradients += [buffer.grad_data for chunk in worker._model.chunks for buffer in chunk.buffers]
    states = optimizer_tensors(torch_optimizers(worker._training.optimizer), [])
    for tensor in [*gradients, *states, *worker._model.parameters()]:
        if tensor.is_cuda:
            tensor.untyped_storage().resize_(0)


def random_rows(count: int, length: int) -> list[TokenRow]:
    source = torch.Generator().manual_seed(1)
    tokens, prompt = torch.randint(4, 60, (count, length), generator=source), min(PROMPT, length // 2)
    mask, generation = [place >= prompt for place in range(length)], [-4.0] * length
    advantages = torch.randn(count, generator=source).tolist()
    return [
        TokenRow(row, mask, generation, advantage) for row, advantage in zip(tokens.tolist(), advantages, strict=True)
    ]


def bars(table: str, medians: dict[str, dict[str, float]]) -> list[dict]:
    if table in ("prepare", "pieces"):
        return [bar for name in medians if "overlapped" in name for bar in hidden(name, medians)]
    if table.startswith("activations") and ON_GPU:
        both = {name: one for name, one in medians.items() if name.startswith("CPU optimizer")}
        alone = {name: one for name, one in medians.items() if name not in (*both, "recomputed instead")}
        return [saved_at_ten_percent(*sets) for sets in (("", alone), (", with a CPU optimizer", both)) if sets[1]]
    return []


def hidden(name: str, medians: dict[str, dict[str, float]]) -> list[dict]:
    """Return two bars of overlapped moves: the share of the copies' time that the rank waited for, and how much longer
    a step is, as a share of that with moves that are waited for. The second one counts what copies slow down, too."""
    overlapped, whole = medians[name], "whole step"
    stays, waited = (medians.get(one, {}).get(whole) for one in ("states stay", "states leave, page-locked"))
    if stays is None or waited is None:
        return []
    moved = [metric for metric in overlapped if metric.endswith("_exposed_s")]
    exposed = sum(overlapped[metric] for metric in moved)
    transfer = sum(overlapped[metric.replace("_exposed_s", "_s")] for metric in moved)
    longer = (overlapped[whole] - stays) / (waited - stays)
    return [
        record.bar(f"{name}: exposed share", exposed / transfer, 0.25, at_least=False),
        record.bar(f"{name}: what a step is longer by, of that without overlap", longer, 0.25, at_least=False),
    ]


def saved_at_ten_percent(where: str, sets: dict[str, dict[str, float]]) -> dict:
    """Return the bar of the saved peak for at most 10 % more time; the first of the sets offloads no activations."""
    peak, (plain, *others) = "policy_peak_bytes/train", sets.values()
    cheap = [one[peak] for one in others if one["train"] <= 1.10 * plain["train"]]
    saved = 1 - min(cheap, default=plain[peak]) / plain[peak]
    return record.bar(f"peak saved at 10 % more training time, best set{where}", saved, 0.20, at_least=True)


def unit_of(metric: str) -> str:
    return "GB/s" if metric.endswith("gb_per_s") else "bytes" if metric.endswith("bytes") else "s"


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Time the block in seconds. Work that still runs on the device afterwards counts for the phase that waits for it,
    and for the whole step."""
    started = time.perf_counter()
    yield
    times[name] = time.perf_counter() - started


def place() -> dict[str, str]:
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def forget() -> None:
    """Leave megatron-core's and torch's groups, and free the memory of the last setting."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    # Each process has one manager, with the pattern of the last model's passes; the next use makes a new one.
    PipelineOffloadManager.OFFLOAD_MGR = None
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def _synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
