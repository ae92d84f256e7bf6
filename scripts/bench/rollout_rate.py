"""Measure tokens per second of one engine, and what vLLM's own settings change.

rollout_rate.py {MODEL|SHAPE[:LAYERS] --tokenizer FOLDER} [--sequences 512] [--prompt 46] [--tokens 512]
    [--only SETTING ...]

Each setting runs in a separate process, and samples SEQUENCES responses of exactly TOKENS tokens four times, 8 to a
prompt. The first time does not count. MODEL is a folder; a SHAPE of random_model.py needs no weights. The record is
written after each setting.

The roofline adds the times of linear layers and of attention. Each is the time for its bytes at the GPU's bandwidth, or
for its FLOPs at the GPU's peak if that is longer. `--profile` adds the kernels of 32 decoding steps, halfway.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import random_model
import record
from kernel_times import kernels
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from whole_runs import KNOWN_EXPERTS, KNOWN_MODEL, tiny_model

from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.generation.interface import Request, Sampling
from nemo_rl_lite.models.flops import attention_flops, matrix_flops
from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.observability import profiling
from nemo_rl_lite.observability.timer import DecodingSpeed
from nemo_rl_lite.planning.budget import known_by_name
from nemo_rl_lite.planning.memory import DecodingBytes
from nemo_rl_lite.refit.engine import WeightsState
from nemo_rl_lite.system.machine import gpu_name
from nemo_rl_lite.validation.compose import compose_config

PROMPT_TOKENS, REPEATS, SAMPLES, TARGET = 46, 4, 8, 0.65
KWARGS = "+generation.vllm_kwargs"
COMPILED = "generation.vllm_kwargs.compilation_config.mode=3"
BLOCKS = f"{KWARGS}.block_size=128"
TRITON = f"{KWARGS}.attention_backend=TRITON_ATTN"
CASCADE = f"{KWARGS}.attention_backend=CUSTOM"
VLLM = f"{KWARGS}.attention_backend=FLASH_ATTN"
ONE_SPLIT = f"{KWARGS}.attention_config={{flash_attn_max_num_splits_for_cuda_graph: 1}}"
SETTINGS: dict[str, list[str]] = {
    "the launcher's": [],
    "vLLM's attention in one split": [VLLM, ONE_SPLIT],
    "blocks of 128 tokens": [BLOCKS],
    "compiled": [COMPILED],
    "Triton attention": [TRITON],
    "FlashInfer attention": [f"{KWARGS}.attention_backend=FLASHINFER", f"{KWARGS}.enable_flashinfer_autotune=false"],
    "compiled, Triton attention": [COMPILED, TRITON],
    "cascade attention": [CASCADE],
    "cascade attention in one split": [CASCADE, ONE_SPLIT],
    "fp8 cache": [f"{KWARGS}.kv_cache_dtype=fp8"],
    "vLLM's attention": [VLLM],
    "first runner": [],
}
ENVIRONMENTS = {"first runner": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
GPU = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "generation.colocated.sleep=false"),
    "generation.vllm_cfg.gpu_memory_utilization=0.85",
]
# No refit comes: the engine begins with the model's weights, or with random ones.
FORMAT = f"{KWARGS}.load_format="
ROOFLINE = "roofline share of decoding"
Results = list[dict[str, Any]]
# Decoding steps of a profile.
PROFILED = 32


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL|SHAPE")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer of a SHAPE")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--record", default="engine-settings", help="name of the record")
    parser.add_argument("--profile", action="store_true")
    # `--only` in a process that compiles ends in the source that torch.compile writes.
    parser.add_argument("--here", choices=SETTINGS, metavar="SETTING", help="measure it in this process; print JSON")
    given = parser.parse_args(arguments)
    if given.here:
        wanted = [
            *GPU,
            f"generation.vllm_cfg.max_num_seqs={given.sequences}",
            f"policy.max_total_sequence_length={given.prompt + given.tokens}",
            f"generation.max_new_tokens={given.tokens}",
            *SETTINGS[given.here],
        ]
        with tempfile.TemporaryDirectory() as folder:
            model, name, load = Path(given.model), "", "auto"
            if given.tokenizer is not None:
                model, load = Path(folder), "dummy"
                without_weights(given.model, given.tokenizer, model)
                experts = find_shape(folder, model / "config.json").experts
                name = KNOWN_EXPERTS if experts else KNOWN_MODEL
                # Random routers choose the same few experts.
                os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random" if experts else ""
            prompts = Prompts(given.sequences // SAMPLES, SAMPLES, given.prompt)
            found = Run(model, [*wanted, f"{FORMAT}{load}"], prompts, name)
            results = found.rates(given.here)
            if given.profile:
                results += found.kernels(given.here, Path(folder) / "decoding.json.gz")
        print(json.dumps(results))
        return
    results: Results = []
    for name in given.only:
        sizes = [f"--{size}={getattr(given, size)}" for size in ("sequences", "prompt", "tokens")]
        sizes += ["--profile"] * given.profile
        tokenizer = [f"--tokenizer={given.tokenizer}"] if given.tokenizer else []
        command = [sys.executable, __file__, given.model, *sizes, *tokenizer, "--here", name]
        environment = os.environ | ENVIRONMENTS.get(name, {})
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            print(f"{name}: status {done.returncode}", flush=True)
            continue
        own = json.loads(done.stdout.splitlines()[-1])
        results += own
        note = f"model: {Path(given.model).name}, {given.sequences} sequences of {given.tokens} tokens"
        note += f", prompts of {given.prompt}"
        print(name, {one["name"]: one["median"] for one in own}, write(given.record, results, note), flush=True)


def without_weights(shape: str, tokenizer: Path, folder: Path) -> None:
    """Write a model's folder without its weights."""
    config = random_model.model_config(shape)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def write(name: str, results: Results, note: str) -> Path:
    """Write the record; the launcher's setting alone has a bar."""
    ours = [one["median"] for one in results if (one["name"], one["config"]) == (ROOFLINE, "the launcher's")]
    bars = [record.bar(f"{ROOFLINE}, the launcher's", share, TARGET, at_least=True) for share in ours]
    return record.write(name, results, bars, note)


@dataclass(frozen=True)
class Prompts:
    count: int
    samples: int
    """Samples of each prompt."""
    tokens: int = PROMPT_TOKENS


class Run:
    """An engine and its requests.

    A model without weights begins with random ones, and needs the `name` of a known model.
    """

    def __init__(self, model: Path, overrides: list[str], prompts: Prompts, name: str = ""):
        config = compose_config([*overrides, f"policy.model_name={name or model.resolve()}"])
        on_gpu = gpu_name() is not None
        own = engine_of(config)
        os.environ |= own.environment(config.generation, on_gpu)
        module, _, worker = own.worker.rpartition(".")
        engine_class = getattr(importlib.import_module(module), worker)
        started = time.perf_counter()
        self.engine = engine_class(config.generation, config.policy, str(model.resolve()), seed=1, on_gpu=on_gpu)
        self.engine._weights = WeightsState(complete=True)
        self.start_s = time.perf_counter() - started
        self.tokens = config.generation.max_new_tokens
        self.shape = find_shape(str(model), model / "config.json")
        self.bytes = DecodingBytes.of(config, self.shape)
        sampling = Sampling(1.0, 1.0, None, self.tokens, (), ())
        self.prompt = prompts.tokens
        asked = [tuple(4 + prompt + place for place in range(self.prompt)) for prompt in range(prompts.count)]
        self.requests = [Request(prompt, sampling, seed) for prompt in asked for seed in range(prompts.samples)]

    def rates(self, setting: str) -> Results:
        """Return the start's seconds, and of each repetition tokens per second and shares of the bandwidth and the
        roofline."""
        count, tokens, gpu = len(self.requests), self.tokens, known_by_name(gpu_name())
        speed = DecodingSpeed(self.bytes.step, self.bytes.token, gpu.bandwidth if gpu else None)
        linear = count * matrix_flops(self.shape, tokens)
        whole, prompt = (attention_flops(self.shape, length) for length in (self.prompt + tokens, self.prompt))
        rates, shares, of_roofline = [], [], []
        for repeat in range(REPEATS):
            seconds, decoded = self._sample(), self.engine.take_decoded()
            if not repeat:
                continue
            rates.append(count * tokens / seconds)
            if gpu is not None:
                shares.append(speed.metrics(decoded.steps, decoded.cached, seconds)["generation_bandwidth_share"])
                least = max(decoded.steps * self.bytes.step / gpu.bandwidth, linear / gpu.flops)
                least += max(decoded.cached * self.bytes.token / gpu.bandwidth, count * (whole - prompt) / gpu.flops)
                of_roofline.append(least / seconds)
        results = [
            record.result("throughput", setting, "tokens/s", rates),
            record.result("start", setting, "s", [self.start_s]),
        ]
        if gpu is not None:
            results.append(record.result("bandwidth share of decoding", setting, "share", shares))
            results.append(record.result(ROOFLINE, setting, "share", of_roofline))
        return results

    def kernels(self, setting: str, trace: Path) -> Results:
        """Return the kernels of PROFILED decoding steps, halfway through the responses."""
        begin = self.tokens // 2
        self._sample({begin: lambda: profiling.begin("torch"), begin + PROFILED: lambda: profiling.end(trace)})
        return list(kernels([trace], f"{PROFILED} decoding steps, {setting}"))

    def _sample(self, events: Mapping[int, Callable[[], None]] = MappingProxyType({})) -> float:
        """Return the seconds. `events`: functions by the engine's step before which they are called."""
        begun, done, step = time.perf_counter(), {}, 0
        self.engine.submit(dict(enumerate(self.requests)))
        while len(done) < len(self.requests):
            if step in events:
                events[step]()
            done |= self.engine.step()
            step += 1
        if any(len(one.tokens) != self.tokens for one in done.values()):
            raise RuntimeError("the engine did not sample what it was asked for")
        return time.perf_counter() - begun


def trial() -> None:
    """Measure the reference engine in this process."""
    small = ["generation=transformers", "policy.max_total_sequence_length=64", "generation.max_new_tokens=8"]
    with patch.dict(os.environ), tempfile.TemporaryDirectory() as folder:
        results = Run(tiny_model(), small, Prompts(2, 2)).rates("the launcher's")
        without_weights("qwen3-30b-a3b:2", tiny_model(), Path(folder))
    print(write("engine-settings", results, "model: tiny"))


if __name__ == "__main__":
    record.start(main, trial)
