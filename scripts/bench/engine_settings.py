"""What vLLM's own settings give the launcher's engine: engine_settings.py MODEL [--only NAME ...] [--small]

Each setting runs in a process of its own, and samples 64 prompts x 8 responses of exactly 512 tokens four times, of
which the first does not count. MODEL is a folder, also one with random weights. `--profile` prints which kernels and
which Python took the time of one more repetition. `--small` is for CPUs. The record is written after each setting.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import record

from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.generation.interface import Request, Sampling
from nemo_rl_lite.generation.vllm.worker import VLLMEngine
from nemo_rl_lite.host.devices import gpu_name
from nemo_rl_lite.models.shape import read_model_shape
from nemo_rl_lite.observability.speed import DecodingSpeed
from nemo_rl_lite.planning.gpus import known_by_name
from nemo_rl_lite.planning.memory import DecodingBytes
from nemo_rl_lite.rules.compose import compose_config

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
GPU = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "policy.max_total_sequence_length=640"]
GPU += [
    "generation.vllm_cfg.gpu_memory_utilization=0.6",
    "generation.max_new_tokens=512",
    "generation.colocated.sleep=false",
]
SMALL = ["generation=vllm", "policy.max_total_sequence_length=96", "generation.max_new_tokens=16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--small", action="store_true", help="few short responses, for CPUs")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--here", action="store_true", help="measure the one setting in this process, and print JSON")
    given = parser.parse_args()
    if given.here:
        measure(given.model, given.only[0], given.small, given.profile)
        return
    results, bars = [], []
    for name in given.only:
        options = [*(["--small"] if given.small else []), *(["--profile"] if given.profile else [])]
        command = [sys.executable, __file__, str(given.model), "--only", name, "--here", *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{name}: status {done.returncode}", flush=True)
            continue
        measured = json.loads(done.stdout.splitlines()[-1])
        for what, (unit, values) in measured.items():
            results.append(record.result(what, name, unit, values))
        shares = [one["median"] for one in results if one["config"] == name and one["unit"] == "share"]
        bars += [record.bar(f"bandwidth share of decoding, {name}", share, TARGET, at_least=True) for share in shares]
        print(name, {one["name"]: one["median"] for one in results if one["config"] == name}, flush=True)
        record.write("engine-settings", results, bars, f"model: {given.model.name}")


def measure(model: Path, setting: str, small: bool, profiled: bool) -> None:
    """Print the start's seconds, and tokens a second and the share of the memory's bandwidth of each repetition."""
    prompts, samples = (4, 2) if small else (64, 8)
    # The engine begins with the model's own weights, because no refit comes.
    own = [*(SMALL if small else GPU), *SETTINGS[setting], f"policy.model_name={model.resolve()}"]
    config = compose_config([*own, *([] if small else [f"{KWARGS}.load_format=auto"])])
    os.environ |= engine_of(config).environment(config.generation, not small)
    started = time.perf_counter()
    engine = VLLMEngine(config.generation, config.policy, str(model.resolve()), seed=1, on_gpu=not small)
    start, tokens = time.perf_counter() - started, config.generation.max_new_tokens
    sampling = Sampling(1.0, 1.0, None, tokens, (), ())
    asked = [tuple(1000 + prompt + place for place in range(PROMPT_TOKENS)) for prompt in range(prompts)]
    requests = [Request(prompt, sampling, seed) for seed in range(samples) for prompt in asked]

    def sample() -> float:
        begun = time.perf_counter()
        engine.submit(dict(enumerate(requests)))
        done = engine.poll(3600)
        if any(len(one.tokens) != tokens for one in done.values()) or len(done) != len(requests):
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
    if profiled:
        profile(sample)
    found: dict[str, Any] = {"tokens a second": ("tokens/s", rates), "start": ("s", [start])}
    print(json.dumps(found | ({"bandwidth share of decoding": ("share", shares)} if shares else {})), flush=True)


def profile(sample: Any) -> None:
    """Print to stderr where the GPU's time goes, and then the CPU's."""
    import cProfile
    import pstats

    import torch

    kinds = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *kinds]) as traced:
        sample()
    by = "self_cuda_time_total" if kinds else "self_cpu_time_total"
    sys.stderr.write(traced.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=90))
    python = cProfile.Profile()
    python.runcall(sample)
    pstats.Stats(python, stream=sys.stderr).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
