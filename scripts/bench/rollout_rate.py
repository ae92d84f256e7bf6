"""Measure tokens per second of one engine, and what vLLM's own settings change: rollout_rate.py MODEL [--only NAME ...]

Each setting runs in a process of its own, and samples 64 prompts x 8 responses of exactly 512 tokens four times, of
which the first does not count. MODEL is a folder, also one with random weights. The record is written after each
setting.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import record
from whole_runs import tiny_model

from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.generation.interface import Request, Sampling
from nemo_rl_lite.models.shape import read_model_shape
from nemo_rl_lite.observability.timer import DecodingSpeed
from nemo_rl_lite.planning.budget import known_by_name
from nemo_rl_lite.planning.memory import DecodingBytes
from nemo_rl_lite.system.machine import gpu_name
from nemo_rl_lite.validation.compose import compose_config

PROMPT_TOKENS, REPEATS, TARGET = 46, 4, 0.6
KWARGS = "+generation.vllm_kwargs"
COMPILED = "generation.vllm_kwargs.compilation_config.mode=3"
BLOCKS = f"{KWARGS}.block_size=128"
TRITON = f"{KWARGS}.attention_backend=TRITON_ATTN"
ONE_SPLIT = f"{KWARGS}.attention_config={{flash_attn_max_num_splits_for_cuda_graph: 1}}"
SETTINGS: dict[str, list[str]] = {
    "the launcher's": [],
    "attention in one split": [ONE_SPLIT],
    "blocks of 128 tokens": [BLOCKS],
    "compiled": [COMPILED],
    "compiled, one split, blocks of 128": [COMPILED, ONE_SPLIT, BLOCKS],
    "Triton attention": [TRITON],
    "compiled, Triton attention": [COMPILED, TRITON],
    "fp8 cache": [f"{KWARGS}.kv_cache_dtype=fp8"],
}
GPU = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "policy.max_total_sequence_length=640"),
    *("generation.vllm_cfg.gpu_memory_utilization=0.6", "generation.max_new_tokens=512"),
    # The engine begins with the model's own weights, because no refit comes.
    *("generation.colocated.sleep=false", f"{KWARGS}.load_format=auto"),
]
Found = dict[str, tuple[str, list[float]]]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--here", action="store_true", help="measure the one setting in this process, and print JSON")
    given = parser.parse_args(arguments)
    if given.here:
        print(json.dumps(measure(given.model, [*GPU, *SETTINGS[given.only[0]]], prompts=64, samples=8)))
        return
    found: dict[str, Found] = {}
    for name in given.only:
        command = [sys.executable, __file__, str(given.model), "--only", name, "--here"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{name}: status {done.returncode}", flush=True)
            continue
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, found[name], write(given.model.name, found), flush=True)


def write(model: str, found: dict[str, Found]) -> Path:
    """Write the record; the launcher's setting alone has a bar."""
    results = [
        record.result(what, name, unit, values)
        for name, measured in found.items()
        for what, (unit, values) in measured.items()
    ]
    shares = [one["median"] for one in results if (one["config"], one["unit"]) == ("the launcher's", "share")]
    bars = [record.bar("bandwidth share of decoding, the launcher's", share, TARGET, at_least=True) for share in shares]
    return record.write("engine-settings", results, bars, f"model: {model}")


def measure(model: Path, overrides: list[str], prompts: int, samples: int) -> Found:
    """Return the start's seconds, and tokens per second and the share of the memory's bandwidth of each repetition."""
    config, on_gpu = compose_config([*overrides, f"policy.model_name={model.resolve()}"]), gpu_name() is not None
    own = engine_of(config)
    os.environ |= own.environment(config.generation, on_gpu)
    module, _, name = own.worker.rpartition(".")
    engine_class = getattr(importlib.import_module(module), name)
    started = time.perf_counter()
    engine = engine_class(config.generation, config.policy, str(model.resolve()), seed=1, on_gpu=on_gpu)
    start, tokens = time.perf_counter() - started, config.generation.max_new_tokens
    sampling = Sampling(1.0, 1.0, None, tokens, (), ())
    asked = [tuple(4 + prompt + place for place in range(PROMPT_TOKENS)) for prompt in range(prompts)]
    requests = [Request(prompt, sampling, seed) for seed in range(samples) for prompt in asked]

    def sample() -> float:
        begun, done = time.perf_counter(), {}
        engine.submit(dict(enumerate(requests)))
        while len(done) < len(requests):
            done |= engine.step()
        if any(len(one.tokens) != tokens for one in done.values()):
            raise RuntimeError("the engine did not sample what it was asked for")
        return time.perf_counter() - begun

    nbytes, gpu = DecodingBytes.of(config, read_model_shape(str(model))), known_by_name(gpu_name())
    speed = DecodingSpeed(nbytes.step, nbytes.token, gpu.bandwidth if gpu else None)
    rates, shares = [], []
    for repeat in range(REPEATS):
        seconds, decoded = sample(), engine.take_decoded()
        if repeat:
            rates.append(len(requests) * tokens / seconds)
            metrics = speed.metrics(decoded.steps, decoded.cached, seconds)
            shares += [value for name, value in metrics.items() if name.endswith("bandwidth_share")]
    found: Found = {"throughput": ("tokens/s", rates), "start": ("s", [start])}
    return found | ({"bandwidth share of decoding": ("share", shares)} if shares else {})


def trial() -> None:
    """Measure the reference engine in this process."""
    small = ["generation=transformers", "policy.max_total_sequence_length=64", "generation.max_new_tokens=8"]
    with patch.dict(os.environ):
        found = measure(tiny_model(), small, prompts=2, samples=2)
    print(write("tiny", {"the launcher's": found}))


if __name__ == "__main__":
    record.start(main, trial)
