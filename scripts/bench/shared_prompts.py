"""Measure groups of responses with a prompt in each row and with shared prompts, in passes or in whole runs:
shared_prompts.py MODEL

shared_prompts.py MODEL [--prompts 64] [--samples 8] [--prompt 2048] [--response 512] [--mb-tokens 12800] [--reps 2]
                        [--profile]
shared_prompts.py MODEL --whole [the same] [-- OVERRIDE ...]

Passes: tokens are random. One policy rank computes previous logprobs, and takes a GRPO optimizer step, without Ray.
Each way has its own process, whose first passes are over few groups and do not count. The record also has the mean
difference of the two ways' logprobs of responses. `--profile` adds the kernels of an optimizer step over few groups.

`--whole`: steps of the train command on one GPU, with prompts of random words. The first does not count.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import record
from kernel_times import kernels
from whole_runs import (
    KNOWN_MODEL,
    PHASES,
    STEPS_ALONE,
    WORDS,
    Quantity,
    model_key,
    one_run,
    processes,
    results_of,
    tiny_model,
    tried,
)

from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.system.machine import free_port, gpu_count
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import policy_arguments, policy_environment

WAYS = {"a prompt in each row": "false", "shared prompts": "true"}
# Groups of the passes that do not count, and steps of a whole run.
FIRST_GROUPS, FIRST_STEPS = 4, 1
# Tokens of a chat template around the words of a prompt, at most.
TEMPLATE = 48
QUANTITIES: list[Quantity] = [
    *PHASES,
    ("policy's memory in training", "GiB", "memory/policy_peak_bytes/train", 2**30),
    ("mean prompt", "tokens", "train/mean_prompt_length", 1),
    ("loss", "nats", "train/loss", 1),
]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name, default in (("prompts", 64), ("samples", 8), ("prompt", 2048), ("response", 512), ("reps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mb-tokens", type=int, default=12800)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    if given.overrides and not given.whole:
        parser.error("overrides need --whole")
    sizes = f"{given.prompts} prompts of {given.prompt} tokens, {given.samples} responses of {given.response} each"
    note = f"{sizes}; packs of {given.mb_tokens} tokens"
    if given.whole:
        print(record.write(f"shared-prompts-run-{given.model.name}", list(whole(given)), [], note))
        return
    context, results, logprobs, profiled = processes(gpu_count() > 0), [], [], []
    for way, value in WAYS.items():
        answers = context.Queue()
        process = context.Process(target=measure, args=(given, way, value, str(free_port()), answers))
        process.start()
        try:
            while process.exitcode is None and answers.empty():
                time.sleep(0.1)
            measured, own, of_kernels = answers.get(timeout=5)
        finally:
            process.join(60)
            process.kill()
        logprobs.append(own)
        profiled += of_kernels
        units = {name: "s" if name.endswith("time") else "GiB" for name in measured}
        results += [record.result(name, way, units[name], reps) for name, reps in measured.items()]
        print(way, {one["name"]: round(one["median"], 2) for one in results if one["config"] == way}, flush=True)
    plain, shared = logprobs
    results.append(record.result("mean logprob difference", "both", "nats", [float(abs(plain - shared).mean())]))
    print(results[-1]["name"], results[-1]["median"])
    record.write(f"shared-prompts-{given.model.name}", results + profiled, [], note)


def whole(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the command both ways, and yield the results of its steps."""
    chosen, count = random.Random(0), given.prompt - TEMPLATE
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        questions = (" ".join(chosen.choices(WORDS, k=count)) for _ in range(given.prompts * 8))
        rows.write_text("".join(f"{json.dumps({'prompt': one, 'answer': '1'})}\n" for one in questions))
        own = ["data.name=file", f"data.train_path={rows}", "reward=format", "reward.kwargs.pattern='.*[aeiou]'"]
        own += ["generation=vllm_gpu"] if gpu_count() else []
        own += [*STEPS_ALONE, f"algorithm.max_num_steps={FIRST_STEPS + given.reps}", *given.overrides]
        for way, value in WAYS.items():
            steps, _ = one_run([*overrides(given, value), *own], FIRST_STEPS)
            results = results_of(steps, way, QUANTITIES)
            print(way, {one["name"]: round(one["median"], 3) for one in results}, flush=True)
            yield from results


def overrides(given: argparse.Namespace, shared: str) -> list[str]:
    place = ["policy=megatron_gpu", "cluster.gpus_per_node=1"] if gpu_count() else ["cluster.cpu_ranks=1"]
    return [
        *place,
        model_key(given.model),
        f"algorithm.num_prompts_per_step={given.prompts}",
        f"algorithm.num_generations_per_prompt={given.samples}",
        f"policy.train_global_batch_size={given.prompts * given.samples}",
        f"policy.max_total_sequence_length={given.prompt + given.response}",
        f"generation.max_new_tokens={given.response}",
        "algorithm.loss_fn.reference_policy_kl_penalty=0",
        "policy.sequence_packing.enabled=true",
        f"policy.sequence_packing.train_mb_tokens={given.mb_tokens}",
        f"policy.sequence_packing.shared_prompts={shared}",
    ]


def measure(given: argparse.Namespace, way: str, shared: str, port: str, answers: Any) -> None:
    """Answer the times in seconds, the peaks of memory in GiB, the logprobs of some responses, and results of
    kernels."""
    config = compose_config(overrides(given, shared))
    os.environ.update({"CUDA_VISIBLE_DEVICES": "0"} | policy_environment(config))
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    import torch

    from nemo_rl_lite.config.schema_algorithm import GRPOConfig
    from nemo_rl_lite.losses.batch import TokenRow
    from nemo_rl_lite.losses.grpo import GRPOLoss
    from nemo_rl_lite.observability import profiling
    from nemo_rl_lite.policy.worker import MegatronWorker

    worker = MegatronWorker(**policy_arguments(config, given.model))
    loss, source = GRPOLoss(config.options(GRPOConfig).loss_fn), torch.Generator().manual_seed(0)
    vocabulary, length, rows = find_shape(str(given.model)).vocabulary, given.prompt + given.response, []
    mask = [place >= given.prompt for place in range(length)]
    for _ in range(given.prompts):
        prompt = torch.randint(vocabulary, (given.prompt,), generator=source)
        for sample in range(given.samples):
            response = torch.randint(vocabulary, (given.response,), generator=source)
            rows.append(TokenRow(torch.cat([prompt, response]).numpy(), mask, [-8.0] * length, (-1.0) ** sample))

    def timed(pass_of: Any) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        pass_of()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def passes(own: list[TokenRow], begin: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Return the seconds of both passes. `begin` is called before the second one."""
        counts = loss.counts(own)
        worker.put_batch(own)
        worker.prepare_for_logprob()
        scoring = timed(lambda: worker.score(("previous",), counts))
        worker.prepare_for_training()
        begin()
        return scoring, timed(lambda: worker.train(loss, counts))

    # Equal weights in both ways.
    worker.put_batch(rows[: given.samples])
    worker.prepare_for_logprob()
    worker.score(("previous",), loss.counts(rows[: given.samples]))
    logprobs = worker._held["train"].previous_logprobs[:, given.prompt :].numpy()
    passes(rows[: FIRST_GROUPS * given.samples])
    worker.pop_memory()
    scoring, training = zip(*(passes(rows) for _ in range(given.reps)), strict=True)
    peaks, found = worker.pop_memory(), {"logprob time": [*scoring], "training time": [*training]}
    for phase in ("logprob", "train"):
        metric = f"policy_peak_bytes/{phase}"
        found |= {f"{phase} peak": [peaks[metric] / 2**30]} if metric in peaks else {}
    of_kernels = []
    if given.profile:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "step.json.gz"
            passes(rows[: FIRST_GROUPS * given.samples], lambda: profiling.begin("torch"))
            profiling.end(trace)
            of_kernels = list(kernels([trace], f"step of {FIRST_GROUPS} prompts, {way}"))
    answers.put((found, logprobs, of_kernels))


def trial() -> None:
    """Compose whole runs, and measure a rank on CPUs with a tiny model."""
    with tried():
        main([KNOWN_MODEL, "--whole", "--reps", "1"])
    sizes = {"prompts": 4, "samples": 4, "prompt": 24, "response": 8, "mb-tokens": 64, "reps": 1}
    main([str(tiny_model()), "--profile", *(text for name, size in sizes.items() for text in (f"--{name}", str(size)))])


if __name__ == "__main__":
    record.start(main, trial)
