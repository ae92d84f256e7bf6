"""Measure rollouts of one engine whose KV cache overflows: full_cache.py MODEL [--only TASK ...] [--ways WAY ...]

MODEL is a folder, also one with random weights: the lengths of the responses are drawn as in `admission.py`, and no
token ends them. Each way samples two steps, of which the second counts. The record is written after each way.

On an H100, "long responses" takes 6 minutes with both ways and the start. Estimates for the others are 4 minutes for
"6 turns" and 2 for "short responses".
"""

import argparse
import asyncio
import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import admission
import record
from whole_runs import tiny_model

from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.generation.interface import Conversation, Request, Requests, Sampling
from nemo_rl_lite.generation.loop import LocalReplica
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.system.machine import gpu_name
from nemo_rl_lite.validation.compose import compose_config

LONGEST = 12_288
TASKS = {
    "long responses": admission.Task("long responses", 24, 8, 100, 2_000, 8_000),
    "6 turns": admission.Task("6 turns", 8, 8, 1_000, 300, 600, turns=6, answer=400, waits_s=0.5),
    "short responses": admission.Task("short responses", 48, 8, 100, 512, 2_048),
}
GPU = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "generation.max_new_tokens=8000"),
    # A cache of 64,000 tokens, on any GPU.
    *(f"policy.max_total_sequence_length={LONGEST}", "+generation.vllm_kwargs.num_gpu_blocks_override=4000"),
    "generation.vllm_cfg.max_num_seqs=256",
    # The engine begins with the model's own weights, because no refit comes.
    *("generation.colocated.sleep=false", "+generation.vllm_kwargs.load_format=auto"),
]


class Rollouts:
    """Rollouts of a task on an engine in this process."""

    def __init__(self, replica: LocalReplica, way: admission.Way, most: int):
        self._engine: Any = replica.loop.engine
        self._queue = RequestQueue([replica], most, _fail, _fail)
        if not way.orders:
            self._queue._assignment = admission.InOrder(1, most)
        if not way.admits:
            self._queue._assignment.held[0].admission = admission.Unaware(most)
        if hasattr(self._engine, "_engine"):
            manager = self._engine._engine.engine_core.engine_core.scheduler.kv_cache_manager
            manager.watermark_blocks = int(way.watermark * manager.block_pool.num_gpu_blocks)

    def step(self, task: admission.Task, step: int) -> dict[str, tuple[str, float]]:
        """Sample the rollout of a step; return its measured quantities."""
        self._engine.take_decoded()
        # No step finds the prefixes of another one.
        self._engine.version += 1
        began = time.perf_counter()
        tokens = asyncio.run(self._sample(task, step))
        seconds, decoded = time.perf_counter() - began, self._engine.take_decoded()
        used = decoded.cache.metrics(decoded.steps)
        found = {"throughput": ("tokens/s", tokens / seconds), "rollout": ("s", seconds)}
        return found | {name.replace("_", " "): ("", value) for name, value in used.items()}

    async def _sample(self, task: admission.Task, step: int) -> int:
        async with self._queue.serving() as requests:
            with requests.submit_as_batch():
                episodes = task.episodes(step)
                playing = [asyncio.create_task(_play(one, task, seed, requests)) for seed, one in enumerate(episodes)]
                await asyncio.sleep(0)
            return sum(await asyncio.gather(*playing))


async def _play(episode: admission.Episode, task: admission.Task, seed: int, requests: Requests) -> int:
    """Sample the turns of an episode; return its sampled tokens."""
    prompt, sampled = tuple(4 + token + place % 50 for place, token in enumerate(episode.tokens)), 0
    conversation = Conversation(ended=task.turns == 1)
    for turn, length in enumerate(episode.lengths):
        length = min(length, LONGEST - len(prompt))
        if length <= 0:
            break
        sampling = Sampling(1.0, 1.0, None, length, (), ())
        completion, _ = await requests.sample(Request(prompt, sampling, seed * 1000 + turn), conversation)
        sampled += len(completion.tokens)
        prompt += tuple(completion.tokens.tolist()) + tuple(4 + place % 50 for place in range(task.answer))
        await asyncio.sleep(task.waits_s)
    conversation.ended = True
    return sampled


def _fail(*lost: Any) -> None:
    raise RuntimeError("the engine died")


def measure(
    model: Path, overrides: list[str], tasks: Mapping[str, admission.Task], ways: list[str], steps: int = 2
) -> list[dict[str, Any]]:
    """Return the results of each task with each way, and write the record after each."""
    config, on_gpu = compose_config([*overrides, f"policy.model_name={model.resolve()}"]), gpu_name() is not None
    own, most = engine_of(config), config.generation.vllm_cfg.max_num_seqs
    os.environ |= own.environment(config.generation, on_gpu)
    module, _, name = own.worker.rpartition(".")
    made = getattr(importlib.import_module(module), name)
    replica = LocalReplica(lambda: made(config.generation, config.policy, str(model.resolve()), seed=1, on_gpu=on_gpu))
    results: list[dict[str, Any]] = []
    for task in tasks.values():
        for way in ways:
            rollouts = Rollouts(replica, admission.WAYS[way], most)
            found = [rollouts.step(task, step) for step in range(steps)]
            for what, (unit, _) in found[-1].items():
                reps = [one[what][1] for one in found[1:]]
                results.append(record.result(what, f"{task.name}: {way}", unit, reps))
            print(task.name, way, found[1:], flush=True)
            record.write("full-cache", results, [], f"model: {model.name}")
    return results


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=admission.WAYS, default=["vLLM alone", "default"])
    given = parser.parse_args(arguments)
    measure(given.model, GPU, {name: TASKS[name] for name in given.only}, given.ways)


def trial() -> None:
    """Measure the reference engine in this process."""
    small = ["generation=transformers", "policy.max_total_sequence_length=64", "generation.max_new_tokens=8"]
    task = replace(TASKS["6 turns"], prompts=2, samples=2, prompt=8, response=4, longest=6, turns=2, answer=2)
    with patch.dict(os.environ):
        measure(tiny_model(), small, {"tiny": replace(task, waits_s=0.0)}, ["default"])


if __name__ == "__main__":
    record.start(main, trial)
