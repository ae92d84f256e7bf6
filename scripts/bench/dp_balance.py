"""Simulate how long data-parallel ranks wait for the slowest one, with neighbouring rows and with balanced shares.

dp_balance.py [REPETITIONS]

Lengths are lognormal with sigma 1 over prompts, and alike within a prompt (sigma 0.3). A rank's time is the FLOPs of
its micro-batches for the shape of a 1.7 B model, including padding; all ranks have as many micro-batches. Launches and
communication are not counted.
"""

import random
import sys
import time
from collections.abc import Sequence
from functools import cache

import record

from nemo_rl_lite.models.shape import KNOWN_MODELS, model_shape
from nemo_rl_lite.planning.memory import forward_flops
from nemo_rl_lite.policy.megatron.micro_batches import Layout
from nemo_rl_lite.policy.megatron.shares import Cost, balanced_shares, work

RANKS, PROMPTS, SAMPLES, PROMPT_TOKENS, MEDIAN, LONGEST, TARGET = 8, 64, 8, 64, 600, 8192, 0.02
LAYOUTS = {"packed": Layout("packed", 16384, 64), "dynamic": Layout("dynamic", 16384, 64)}


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    shape, results, bars = model_shape(KNOWN_MODELS["Qwen/Qwen3-1.7B"]), [], []

    @cache
    def flops(tokens: float) -> float:
        return forward_flops(shape, tokens)

    for name, layout in LAYOUTS.items():
        found: dict[str, list[float]] = {"neighbours": [], "balanced": []}
        seconds = []
        for repetition in range(repetitions):
            lengths = _lengths(random.Random(repetition))
            share, began = len(lengths) // RANKS, time.perf_counter()
            balanced = balanced_shares(lengths, RANKS, flops, layout=layout)
            seconds.append(time.perf_counter() - began)
            found["balanced"].append(_idle(lengths, balanced, layout, flops))
            neighbours = [range(rank * share, (rank + 1) * share) for rank in range(RANKS)]
            found["neighbours"].append(_idle(lengths, neighbours, layout, flops))
        for way, idle in found.items():
            results.append(record.result(f"idle share of {RANKS} ranks, {way}", name, "share", idle))
            print(f"{name}, {way}: median {results[-1]['median']:.4f}, most {max(idle):.4f}")
        bars.append(record.bar(f"idle share, balanced, {name}, median", results[-1]["median"], TARGET, at_least=False))
        results.append(record.result("time to choose the balanced shares", name, "s", seconds))
    record.write("speed-balance", results, bars, f"{PROMPTS} prompts x {SAMPLES} samples, simulated")


def _lengths(source: random.Random) -> list[int]:
    means = [source.lognormvariate(0, 1) for _ in range(PROMPTS)]
    tokens = [MEDIAN * mean * source.lognormvariate(0, 0.3) for mean in means for _ in range(SAMPLES)]
    return [PROMPT_TOKENS + min(LONGEST, max(1, int(length))) for length in tokens]


def _idle(lengths: Sequence[int], shares: Sequence[Sequence[int]], layout: Layout, flops: Cost) -> float:
    """The share of all ranks' time in which they wait for the slowest."""
    owned = [[lengths[row] for row in share] for share in shares]
    most = max(len(layout.groups(own)) for own in owned)
    ranks = [work(own, layout, flops, most) for own in owned]
    return 1 - sum(ranks) / len(ranks) / max(ranks)


if __name__ == "__main__":
    main()
