"""Processor time of vLLM's scheduler for a step, its own and ours: engine_scheduler.py MODEL [REQUESTS [TOKENS]]

No model runs: REQUESTS (512) responses of TOKENS (128) tokens each are scheduled, and the results are made up. Times
are those of the thread, so that other programs do not count.
"""

import gc
import sys
import time
from typing import Any

import record
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from nemo_rl_lite.compat.vllm_scheduler import DecodeScheduler
from tests.functional.vllm_schedulers import BLOCK, Engine, result_of

PROMPT, REPEATS, TARGET = 40, 5, 3
NAMES = {AsyncScheduler: "vLLM's", DecodeScheduler: "with the short way"}


def main() -> None:
    model, given = sys.argv[1], [int(number) for number in sys.argv[2:4]]
    requests, tokens = [*given, *(512, 128)[len(given) :]]
    init_none_hash(sha256)
    results, medians = [], {}
    for kind, name in NAMES.items():
        engine = Engine(kind, model, 100_000, requests, PROMPT + tokens)
        gc.freeze()
        reps = [step_times(engine.scheduler, requests, tokens) for _ in range(REPEATS)]
        results += [
            record.result(f"{part}, {requests} requests", name, "ms", [1000 * one[place] for one in reps])
            for place, part in enumerate(("schedule", "update from output"))
        ]
        medians[name] = sum(one["median"] for one in results[-2:])
        print(name, medians[name], "ms a step", flush=True)
    before, now = medians.values()
    bars = [record.bar("times less processor time", before / now, TARGET, at_least=True)]
    print(record.write("speed-engine-scheduler", results, bars))


def step_times(scheduler: Any, requests: int, tokens: int) -> tuple[float, float]:
    """Seconds a step of both halves."""
    hasher = get_request_block_hasher(BLOCK, sha256)
    for number in range(requests):
        parameters = SamplingParams(max_tokens=tokens, logprobs=0, seed=number, ignore_eos=True)
        prompt = [5 + number // 8] * PROMPT
        scheduler.add_request(Request(str(number), prompt, parameters, None, block_hasher=hasher))
    under_way, steps, seconds = [], 0, [0.0, 0.0]
    while scheduler.has_requests():
        begun = time.thread_time()
        under_way.append(scheduler.schedule())
        seconds[0] += time.thread_time() - begun
        steps += 1
        if len(under_way) == 2:
            done = under_way.pop(0)
            result = result_of(scheduler, done)
            begun = time.thread_time()
            scheduler.update_from_output(done, result)
            seconds[1] += time.thread_time() - begun
    return seconds[0] / steps, seconds[1] / steps


if __name__ == "__main__":
    main()
