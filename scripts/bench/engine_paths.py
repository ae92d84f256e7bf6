"""Compare the ways to drive vLLM: offline generate, an engine stepped in place or in its own process, AsyncLLM.

engine_paths.py MODEL_FOLDER [PROMPTS SAMPLES TOKENS REPEATS [WAY ...]]

Each way runs in a process of its own and samples PROMPTS x SAMPLES responses of exactly TOKENS tokens, with the
logprob of each. `offline` gives a prompt once, with n = SAMPLES and no seed; the other ways give each sample its own
request and seed. The model's weights are random; the folder needs only config.json.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import record

WAYS = ("offline", "stepped", "stepped without logprobs", "stepped without seeds", "stepped, own process", "async")
PROMPT_TOKENS, TARGET = 46, 1.3
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def main() -> None:
    model, numbers, ways = sys.argv[1], [int(given) for given in sys.argv[2:6]] or [64, 8, 512, 3], sys.argv[6:] or WAYS
    results = []
    for way in ways:
        command = [sys.executable, __file__, "--way", way, model, *map(str, numbers)]
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(way in ("async", "stepped, own process"))),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        print(way, measured, flush=True)
        shape = "{} prompts x {} samples x {} tokens".format(*numbers)
        rates = [numbers[0] * numbers[1] * numbers[2] / seconds for seconds in measured["seconds"]]
        results.append(record.result(way, shape, "tokens/s", rates))
        results.append(record.result(f"{way}: start", shape, "s", [measured["start"]]))
    record.write("rollouts-engine-paths", results, bars(results), f"model: {Path(model).name}, random weights")


def bars(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The target: tokens a second of the way that the launcher takes over those of offline generation."""
    rates = {one["name"]: one["median"] for one in results}
    if not {"stepped", "offline"} <= rates.keys():
        return []
    return [record.bar("tokens a second, stepped over offline", rates["stepped"] / rates["offline"], TARGET, True)]


def one_way(way: str, model: str, prompts: int, samples: int, tokens: int, repeats: int) -> None:
    """Print the seconds of the start and of each repetition as JSON."""
    import torch
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    on_gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {
        "dtype": "bfloat16" if on_gpu else "float32",
        "max_model_len": PROMPT_TOKENS + tokens + 16,
        "max_num_seqs": 512,
        "enforce_eager": not on_gpu,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "load_format": "dummy",
        # On a CPU, a seed and a prompt that is cut into chunks do not go together in vLLM 0.24.
        **(
            {"gpu_memory_utilization": 0.6, "compilation_config": GRAPHS}
            if on_gpu
            else {"enable_chunked_prefill": False}
        ),
    }
    rng, vocabulary = random.Random(0), json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    asked = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(prompts)]

    def sampling(seed: int | None, n: int = 1) -> SamplingParams:
        return SamplingParams(
            n=n,
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=None if way == "stepped without logprobs" else 0,
            flat_logprobs=True,
            seed=seed,
            output_kind=RequestOutputKind.CUMULATIVE if way == "offline" else RequestOutputKind.FINAL_ONLY,
        )

    requests = [(prompt, sample) for prompt in asked for sample in range(samples)]
    started = time.perf_counter()
    run: Callable[[], int]
    if way == "async":
        run = _async(model, settings, requests, sampling)
    else:
        from vllm import LLM

        llm: Any = LLM(model, **settings)
        if way == "offline":

            def run() -> int:
                given = [TokensPrompt(prompt_token_ids=prompt) for prompt in asked]
                outputs = llm.generate(given, sampling(None, samples), use_tqdm=False)
                return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

        else:
            engine, counter = llm.llm_engine, iter(range(10**9))

            def run() -> int:
                for number, (prompt, _) in enumerate(requests):
                    own = None if way == "stepped without seeds" else number
                    engine.add_request(str(next(counter)), TokensPrompt(prompt_token_ids=prompt), sampling(own))
                done = 0
                while engine.has_unfinished_requests():
                    done += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
                return done

    start, seconds = time.perf_counter() - started, []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        done = run()
        if repeat:
            seconds.append(time.perf_counter() - started)
        if done != len(requests) * tokens:
            raise RuntimeError(f"{done} tokens instead of {len(requests) * tokens}")
    if os.environ.get("NRL_BENCH_PROFILE") and way != "async":
        _profile(run)
    print(json.dumps({"start": start, "seconds": seconds}), flush=True)
    for child in psutil.Process().children(recursive=True):
        # They hold the pipe open, and take seconds to end by themselves.
        child.kill()
    os._exit(0)


def _async(
    model: str, settings: dict[str, Any], requests: list[Any], sampling: Callable[..., Any]
) -> Callable[[], int]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    loop, counter = asyncio.new_event_loop(), iter(range(10**9))

    async def make() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model, **settings))

    engine = loop.run_until_complete(make())

    async def one(number: int, prompt: list[int]) -> int:
        asked = engine.generate(TokensPrompt(prompt_token_ids=prompt), sampling(number), str(next(counter)))
        return sum([len(output.outputs[0].token_ids) async for output in asked])

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(one(number, prompt) for number, (prompt, _) in enumerate(requests))))

    return lambda: loop.run_until_complete(all_of_them())


def _profile(run: Callable[[], int]) -> None:
    """Print to stderr where the CPU's time goes, and the GPU's."""
    import cProfile
    import pstats

    import torch

    profile = cProfile.Profile()
    profile.runcall(run)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(35)
    if torch.cuda.is_available():
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as traced:
            run()
        sys.stderr.write(traced.key_averages().table(sort_by="self_cuda_time_total", row_limit=30))


if __name__ == "__main__":
    if sys.argv[1] == "--way":
        one_way(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:8]))
    else:
        main()
