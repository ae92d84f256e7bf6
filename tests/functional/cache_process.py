"""An engine with a small KV cache in a separate process: cache_process.py MODEL OUTPUT

It samples the same requests with a queue that ignores the cache and with the launcher's. Then it samples turns of
conversations before and after new weights, and writes what it saw.
"""

import asyncio
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_lite.generation.admission import Admission
from nemo_rl_lite.generation.interface import Completion, Conversation, EngineLoad, Request, Sampling
from nemo_rl_lite.generation.loop import LocalReplica
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.generation.vllm.worker import VLLMEngine
from nemo_rl_lite.validation.compose import compose_config

model_folder, output = sys.argv[1:]
BLOCK, BLOCKS, REQUESTS, LENGTH = 16, 40, 24, 100
config = compose_config(
    [
        "generation=vllm",
        f"policy.model_name={model_folder}",
        "policy.max_total_sequence_length=128",
        f"generation.vllm_cfg.max_num_seqs={REQUESTS}",
        f"+generation.vllm_kwargs.block_size={BLOCK}",
        f"+generation.vllm_kwargs.num_gpu_blocks_override={BLOCKS}",
    ]
)
sampling = Sampling(1.0, 1.0, None, LENGTH, (), ())


class Unaware(Admission):
    """Admits all requests."""

    def capacity(self, load: EngineLoad, between_turns: Sequence[int] = ()) -> int:
        return self.most


def fail(*lost: Any) -> None:
    raise AssertionError(lost)


def sample(queue: RequestQueue) -> list[tuple[int, ...]]:
    """The tokens of requests that need four times the cache."""

    async def serve() -> list[list[int]]:
        async with queue.serving() as requests:
            with requests.submit_as_batch():
                asked = [Request((1, 5, 6, 4 + number, 41), sampling, number) for number in range(REQUESTS)]
                begun = [asyncio.create_task(requests.sample(one)) for one in asked]
                await asyncio.sleep(0)
            return [completion.tokens.tolist() for completion, _ in await asyncio.gather(*begun)]

    return asyncio.run(serve())


replica = LocalReplica(
    lambda: VLLMEngine(config.generation, config.policy, model_folder, seed=0, on_gpu=False)  # pyrefly: ignore
)
engine: Any = replica.loop.engine
manager = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager
seen: dict[str, Any] = {"headroom": manager.watermark_blocks}


def measured(name: str, queue: RequestQueue) -> None:
    engine.take_decoded()
    seen[name] = sample(queue), engine.take_decoded().cache


unaware, aware = (RequestQueue([replica], REQUESTS, fail, fail) for _ in range(2))
unaware._assignment.held[0].admission = Unaware(REQUESTS)
manager.watermark_blocks = 0
measured("unaware", unaware)
manager.watermark_blocks = seen["headroom"]
measured("first", aware)
measured("second", aware)

hits, look_up = [], manager.get_computed_blocks


def noted(request: Any) -> Any:
    found = look_up(request)
    hits.append(found[1])
    return found


manager.get_computed_blocks = noted
# A refit without weights.
engine._engine.collective_rpc = lambda *asked, **named: []


def turns(recomputes: bool) -> list[int]:
    """Return the tokens that each turn found in the cache. A refit separates two turns of one conversation. A new
    conversation with the same beginning and a third turn follow."""
    engine._recomputes = recomputes
    prompt, old, new = (45 + recomputes, *range(4, 44)), Conversation(), Conversation()
    hits.clear()

    def turn(conversation: Conversation, tokens: tuple[int, ...]) -> tuple[int, ...]:
        request = conversation.begin_turn(Request(tokens, Sampling(1.0, 1.0, None, 24, (), ()), 0))
        engine.submit({0: request})
        found: dict[int, Completion] = {}
        while not found:
            found = engine.step()
        conversation.add_turn(request, found[0], 0)
        return (*tokens, *found[0].tokens.tolist())

    first = turn(old, prompt)
    engine.receive_weights(engine.version + 1)
    second = turn(old, first)
    turn(new, first)
    turn(old, second)
    return list(hits)


seen["kept"], seen["recomputed"] = turns(False), turns(True)
Path(output).write_bytes(pickle.dumps(seen))
