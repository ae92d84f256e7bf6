"""Train on single sequences, longer and longer, by preset, until they do not fit: longest_context.py MODEL

longest_context.py MODEL [--gpus 1] [--presets none recomputed ...] [--tokens 16384 32768 ...] [--predict H100]

All weights (or LoRA's adapters) are trained on one chat of that many tokens an optimizer step, in bfloat16, with logits
computed in slices and again in the backward pass. Several GPUs share each sequence (context parallelism). The policy's
processes are those of a run, without Ray, and train on one length after another; the first step of each length does not
count. Lengths that the plan predicts to be far too long are not tried. `--predict` trains nothing, and prints what the
plan predicts for a kind of GPU. random_model.py writes models with enough positions. Presets that move memory between
the phases of a GRPO step have no effect in training alone, so they are not among these.
"""

import argparse
import os
import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import record
from whole_runs import processes, tiny_model

from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.offload.residency import Phase
from nemo_rl_lite.planning.automatic import resolve_auto
from nemo_rl_lite.planning.budget import Budget, budget, size_of, speed_of
from nemo_rl_lite.planning.lengths import Lengths
from nemo_rl_lite.planning.time import optimizer_step_seconds
from nemo_rl_lite.system.machine import free_port, gpu_bytes, gpu_count
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import policy_arguments, policy_environment

MEGATRON = "policy.megatron_cfg"
RECOMPUTED = f"{MEGATRON}.activation_checkpointing=true"
LORA = f"{MEGATRON}.peft.enabled=true"
ALL_MODULES = ["offload=activations", f"{MEGATRON}.offload_modules=[qkv_linear,core_attn,attn_proj,mlp]"]
PRESETS = {
    "none": [],
    "recomputed": [RECOMPUTED],
    "activations": ["offload=activations"],
    "all_activations": ALL_MODULES,
    "cpu_optimizer": ["offload=cpu_optimizer"],
    "cpu_optimizer_recomputed": ["offload=cpu_optimizer", RECOMPUTED],
    "lora": [LORA],
    "lora_recomputed": [LORA, RECOMPUTED],
}
# Lengths are tried up to this share of the GPU's memory, predicted, and this one of the host's, which must not run out.
MOST, MOST_HOST = 1.3, 0.75
# Seconds for processes to start and to load a model, of which they say nothing.
START_S = 60


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["none", "recomputed"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**power for power in range(14, 19)])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=270)
    parser.add_argument("--predict", metavar="GPU")
    given = parser.parse_args(arguments)
    ends, results, notes = time.time() + given.limit_s, [], []
    on_gpus = bool(given.predict) or gpu_count() > 0
    memory = size_of(given.predict)[1] if given.predict else gpu_bytes()
    host = None if given.predict else psutil.virtual_memory().total
    for preset in given.presets:
        tried = []
        for tokens in sorted(given.tokens):
            case = f"{tokens} tokens, {preset}"
            own = overrides(given.model, preset, tokens, given.gpus, on_gpus)
            planned, seconds = plan(own, given.model, tokens, memory)
            if problem := too_large(planned, host):
                notes.append(f"{case}: not tried, {problem}")
                print(notes[-1], flush=True)
                continue
            tried.append(tokens)
            results += predicted(case, planned, seconds)
            show(case, results)
        if given.predict or not tried:
            continue
        own = overrides(given.model, preset, tried[-1], given.gpus, on_gpus)
        for tokens, found in lengths(given.model, own, given.gpus, tried, given.steps, ends):
            case = f"{tokens} tokens, {preset}"
            if isinstance(found, str):
                notes.append(f"{case}: {found}")
                print(notes[-1], flush=True)
            else:
                results += measured(case, tokens, given.gpus, found)
                show(case, results)
            name = f"context-longest-{given.model.name}" + (f"-context-{given.gpus}" if given.gpus > 1 else "")
            record.write(name, results, [], "; ".join(notes) or None)


def overrides(model: Path, preset: str, tokens: int, gpus: int, on_gpus: bool) -> list[str]:
    place = ["policy=megatron_gpu", f"cluster.gpus_per_node={gpus}", f"{MEGATRON}.context_parallel_size={gpus}"]
    if not on_gpus:
        # To try this script. Ranks on CPUs cannot share a sequence.
        place = [f"cluster.cpu_ranks={gpus}", f"{MEGATRON}.tensor_model_parallel_size={gpus}"]
    return [
        *("algorithm=sft", *place, "policy.sequence_packing.enabled=true", f"{MEGATRON}.keep_logits=false"),
        *(f"policy.model_name={model.resolve()}", "policy.train_global_batch_size=1"),
        f"policy.max_total_sequence_length={tokens}",
        *(f"policy.sequence_packing.train_mb_tokens={tokens}", "cluster.collective_timeout_s=120"),
        *PRESETS[preset],
    ]


def show(case: str, results: Sequence[dict[str, Any]]) -> None:
    print(case, {one["name"]: round(one["median"], 2) for one in results if one["config"] == case}, flush=True)


def plan(own: list[str], model: Path, tokens: int, memory: int | None) -> tuple[Budget, float | None]:
    """Return the predicted memory, and on a GPU the predicted seconds of a step."""
    shape = find_shape(str(model))
    config = resolve_auto(compose_config(own), shape, memory).config
    planned = budget(config, shape, memory)
    if memory is None:
        return planned, None
    return planned, optimizer_step_seconds(config, shape, speed_of(memory)[1], Lengths(0, tokens, tokens))


def too_large(planned: Budget, host: int | None) -> str | None:
    """Return why a length is not worth trying; None if it may fit."""
    there = planned.gpu_bytes
    if there and planned.device[Phase.TRAIN] > MOST * there:
        return f"predicted to take {planned.device[Phase.TRAIN] / there:.2f} times the GPU's memory"
    if host and planned.host > MOST_HOST * host:
        return f"predicted to take {planned.host / host:.2f} times the host's memory"
    return None


def predicted(case: str, planned: Budget, seconds: float | None) -> list[dict[str, Any]]:
    values = {
        "policy's peak, predicted": planned.policy[Phase.TRAIN],
        "GPU in use, predicted": planned.device[Phase.TRAIN],
        "host memory, predicted": planned.host,
    }
    memory = [record.result(name, case, "GiB", [value / 2**30]) for name, value in values.items()]
    return memory + ([record.result("step time, predicted", case, "s", [seconds])] if seconds else [])


def measured(case: str, tokens: int, gpus: int, found: Sequence[dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Return the results of a length: of all ranks, the slowest and the fullest."""
    most = {name: [max(reps) for reps in zip(*(own[name] for own in found), strict=True)] for name in found[0]}
    results = [record.result(name, case, "s" if name == "step time" else "GiB", reps) for name, reps in most.items()]
    rates = [tokens / seconds / gpus for seconds in most["step time"]]
    return [*results, record.result("throughput per GPU", case, "tokens/s", rates)]


def lengths(
    model: Path, own: list[str], gpus: int, tried: Sequence[int], steps: int, ends: float
) -> Iterator[tuple[int, Sequence[dict[str, list[float]]] | str]]:
    """Train on one length after another. Yields for each what every rank measured, or why there is nothing, which ends
    it: longer ones do not fit either."""
    context, port = processes(gpu_count() > 0), str(free_port())
    answers, started = context.Queue(), time.time()
    arguments = (gpus, port, model, own, tried, steps, answers)
    ranks = [context.Process(target=train, args=(rank, *arguments)) for rank in range(gpus)]
    try:
        for process in ranks:
            process.start()
        found: dict[int, list[dict[str, list[float]] | None]] = {tokens: [] for tokens in tried}
        for tokens in tried:
            # A rank may be ahead of the others.
            while len(found[tokens]) < gpus and None not in found[tokens]:
                try:
                    answered, answer = answers.get(timeout=1)
                    found[answered].append(answer)
                except queue.Empty:
                    if any(process.exitcode for process in ranks):
                        yield tokens, "a process ended, see its output"
                        return
                    if time.time() > max(ends, started + START_S):
                        yield tokens, "the time was over"
                        return
            whole = [one for one in found[tokens] if one is not None]
            if len(whole) < gpus:
                yield tokens, "does not fit"
                return
            yield tokens, whole
    finally:
        for process in ranks:
            process.kill()
            process.join()


def train(
    rank: int, ranks: int, port: str, model: Path, own: list[str], tried: Sequence[int], steps: int, answers: Any
) -> None:
    """Train on each length as one policy rank; answer what was measured, or None when the GPU's memory is full."""
    config = compose_config(own)
    os.environ.update({"CUDA_VISIBLE_DEVICES": str(rank)} | policy_environment(config))
    place = {"RANK": rank, "LOCAL_RANK": 0 if config.cluster.gpus_per_node else rank, "WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    from nemo_rl_lite.policy.worker import MegatronWorker

    tokens = tried[0]
    try:
        worker = MegatronWorker(**policy_arguments(config, model))
        for tokens in tried:
            answers.put((tokens, one_length(worker, find_shape(str(model)).vocabulary, tokens, steps)))
    except RuntimeError as error:
        # Those of libraries have no class of their own.
        if "out of memory" not in str(error).lower():
            raise
        print(f"{tokens} tokens: {str(error).splitlines()[0]}", flush=True)
        answers.put((tokens, None))


def one_length(worker: Any, vocabulary: int, tokens: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of the steps after the first, and the memory in GiB."""
    import torch
    import torch.distributed as dist

    from nemo_rl_lite.losses.batch import TokenRow
    from nemo_rl_lite.losses.supervised import SFTLoss

    drawn = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(tokens))
    rows, loss, times = [TokenRow(drawn.numpy(), [False] + [True] * (tokens - 1))], SFTLoss(), []
    if torch.cuda.is_available():
        # A run of this length alone would not have what shorter ones left.
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
    worker.put_batch(rows)
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        worker.prepare_for_training()
        worker.train(loss, loss.counts(rows))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    names = {
        "policy's peak": "policy_peak_bytes/train",
        "reserved by torch": "policy_reserved_bytes/train",
        "GPU in use": "device_bytes/train",
    }
    memory = worker.pop_memory()
    peaks = {name: [memory[metric] / 2**30] for name, metric in names.items() if metric in memory}
    return {"step time": times[1:]} | peaks


def trial() -> None:
    """Predict for a GPU, and train a rank on CPUs on two short lengths."""
    main([str(tiny_model()), "--predict", "H100", "--presets", "recomputed", "--tokens", "64"])
    main([str(tiny_model()), "--presets", "none", "--tokens", "64", "128", "--steps", "2"])


if __name__ == "__main__":
    record.start(main, trial)
