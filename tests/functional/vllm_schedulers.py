"""vLLM's asynchronous scheduler and ours on the same requests, with no model: vllm_schedulers.py MODEL

Every step of both must compute the same tokens in the same blocks, and say the same of them, while requests come, are
aborted, find the cache full, stop at a token, and while weights are replaced. Exits 0 where it is so.
"""

import random
import sys
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from nemo_rl_lite.compat import vllm_scheduler as ours
from nemo_rl_lite.compat.vllm import import_model_class

BLOCK, STOP, LONGEST = 16, 3, 128
KINDS = (FullAttentionSpec, MLAAttentionSpec)


class Engine:
    """A scheduler with what drives it: a step is begun before the result of the one before is there."""

    def __init__(
        self,
        kind: type[AsyncScheduler],
        model: str,
        blocks: int,
        slots: int,
        longest: int = LONGEST,
        block: type[FullAttentionSpec] = FullAttentionSpec,
    ):
        config = EngineArgs(model, max_num_seqs=slots, max_model_len=longest, block_size=BLOCK).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        spec = block(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = kind(config, cache, StructuredOutputManager(config), BLOCK)
        # A CPU has the first runner only.
        self.scheduler.use_v2_model_runner = True
        if isinstance(self.scheduler, ours.DecodeScheduler):
            self.scheduler._plain = ours._is_plain(self.scheduler)
            assert self.scheduler._plain
        self.under_way: deque[Any] = deque()

    def step(self) -> tuple[Any, list[tuple[Any, ...]]]:
        """What is computed next, and what the engine says of the step before."""
        begun = None
        if self.scheduler.has_requests():
            begun = self.scheduler.schedule()
            self.under_way.append(begun)
        if begun is not None and len(self.under_way) < 2:
            return _comparable(begun), []
        done = self.under_way.popleft()
        return _comparable(begun), self._said(self.scheduler.update_from_output(done, result_of(self.scheduler, done)))

    def _said(self, outputs: dict[int, Any]) -> list[tuple[Any, ...]]:
        said: list[tuple[Any, ...]] = []
        if outputs and isinstance(outputs[0], ours.Samples):
            samples = outputs[0]
            for name, token, logprob in zip(samples.names, samples.tokens, samples.logprobs, strict=True):
                said.append((name, [token], [logprob], None, None))
        for one in outputs[0].outputs if outputs else []:
            logprobs = one.new_logprobs
            values = logprobs.logprobs[:, 0].tolist() if isinstance(logprobs, LogprobsLists) else logprobs
            said.append((one.request_id, list(one.new_token_ids), values, one.finish_reason, one.stop_reason))
        return said


def _comparable(step: Any) -> dict[str, Any] | None:
    return (
        None if step is None else {**asdict(step), "scheduled_new_reqs": [str(new) for new in step.scheduled_new_reqs]}
    )


def result_of(scheduler: AsyncScheduler, step: Any) -> ModelRunnerOutput:
    """Tokens that follow from the request and its length, and none for a prompt that is not at its end."""
    names, tokens = list(step.num_scheduled_tokens), []
    for name in names:
        request = scheduler.requests.get(name)
        length = 0 if request is None else len(request._all_token_ids)
        token = random.Random(f"{name} {length}").randint(STOP, 200)
        tokens.append([] if request is None or request.is_prefill_chunk else [token])
    count = len(names)
    values = np.array([[-0.5 * sum(own)] for own in tokens], dtype=np.float32).reshape(count, 1)
    logprobs = LogprobsLists(np.zeros((count, 1), np.int32), values, np.zeros(count, np.int32))
    return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, tokens, logprobs)


def compare(model: str, seed: int, blocks: int, block: type[FullAttentionSpec]) -> list[int]:
    """Drive both for a while; returns how many steps ours took its short way, and how many results it took so."""
    engines = [Engine(kind, model, blocks, slots=24, block=block) for kind in (AsyncScheduler, ours.DecodeScheduler)]
    short, draw, begun = [0, 0, 0], random.Random(seed), 0
    of_ours: Any = engines[1].scheduler
    for place, name in enumerate(("_one_token_each", "_repeat", "_sampled_again")):
        setattr(of_ours, name, _counted(getattr(of_ours, name), short, place))
    for turn in range(2000):
        for _ in range(draw.choice((0, 0, 0, 0, 2, 8)) if turn < 300 else 0):
            # Several samples of a prompt, as a rollout has them.
            prompt, longest = [5 + begun // 4] * draw.choice((15, 16, 17, 40)), draw.choice((1, 2, 20, 60))
            for engine in engines:
                engine.scheduler.add_request(_request(str(begun), prompt, longest))
            begun += 1
        chance = draw.random()
        if chance < 0.03 and of_ours.running:
            name = draw.choice([request.request_id for request in of_ours.running])
            for engine in engines:
                engine.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        elif chance < 0.04 and of_ours.running:
            # As if vLLM could not compile its grammar.
            name = draw.choice([request.request_id for request in of_ours.running])
            for engine in engines:
                engine.scheduler.grammar_compile_error_reqs.add(name)
        elif chance < 0.06:
            for engine in engines:
                # Otherwise the requests' tokens in flight come too late.
                while engine.under_way and chance > 0.045:
                    done = engine.under_way.popleft()
                    engine.scheduler.update_from_output(done, result_of(engine.scheduler, done))
                engine.scheduler.reset_prefix_cache(reset_running_requests=chance < 0.05)
        if any(engine.scheduler.has_requests() or engine.under_way for engine in engines):
            theirs, own = (engine.step() for engine in engines)
            assert theirs == own, (seed, turn, theirs, own)
        held = [_held(engine.scheduler) for engine in engines]
        assert held[0] == held[1], (seed, turn, held)
    assert not any(engine.scheduler.has_requests() for engine in engines), "requests are left"
    return short


def _held(scheduler: Any) -> tuple[int, dict[str, int]]:
    """The free blocks, and the tokens in flight of each request."""
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free, {name: request.num_in_flight_tokens for name, request in scheduler.requests.items()}


def _counted(method: Any, counts: list[int], place: int) -> Any:
    def counted(*arguments: Any) -> Any:
        given = method(*arguments)
        counts[place] += given is not None
        return given

    return counted


def _request(name: str, prompt: list[int], longest: int) -> Request:
    hasher = get_request_block_hasher(BLOCK, sha256)
    parameters = SamplingParams(max_tokens=longest, stop_token_ids=[STOP], logprobs=0, seed=1)
    return Request(name, list(prompt), parameters, None, block_hasher=hasher)


def main(model: str) -> None:
    import_model_class(Path(model))
    init_none_hash(sha256)
    # In the small cache requests lose their blocks and begin again.
    counts = [compare(model, seed, blocks, KINDS[seed % 2]) for seed in range(6) for blocks in (2000, 60)]
    assert all(count > 20 for ways in counts for count in ways), f"the short ways were taken {counts} times"


if __name__ == "__main__":
    main(sys.argv[1])
