"""Simulate NeMo-RL's published step (published_row.py) from rates that one and two GPUs have shown.

Responses have the lengths of forced_lengths.py. Engines decode them step by step; the launcher's own code shares rows
between replicas and packs them; micro-batches pass through pipeline stages, the last of which has the vocabulary's
matrix. The rates of GPUs are those of shown_rates.py. A layer takes `LAUNCH_S` of planning/time.py or longer, and
gradients and weights pass between replicas at `RATE_INSIDE` of planning/time.py.

Not counted: messages between stages, judging, and what is between phases.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import record
from forced_lengths import dealt
from published_row import LAYERS, MEAN, PROMPT, PUBLISHED, SIGMA
from shown_rates import REQUESTS, Rates, reading, running, shown

from nemo_rl_lite.models.shape import ModelShape, find_shape
from nemo_rl_lite.planning.gpus import KNOWN, Gpu
from nemo_rl_lite.planning.memory import forward_flops, parameter_count
from nemo_rl_lite.planning.time import LAUNCH_S, RATE_INSIDE, REFIT_APART_S
from nemo_rl_lite.policy.megatron.micro_batches import Layout
from nemo_rl_lite.policy.megatron.shares import balanced_shares

SAMPLES, MOST, LOGPROB_PACK = 32, 3840, 16384
TARGET, TARGET_S = "8 x H200, batches of 512", 75
# What NeMo-RL 0.3 publishes for 8 H100 GPUs, in seconds.
THEIRS = {"whole step": 112, "generation": 58, "logprob": 18, "train": 28, "refit": 5}


@dataclass(frozen=True)
class Variant:
    """How GPUs work, as published_row.py has them; `batch` is that of eight GPUs."""

    gpu: str
    gpus: int = 8
    batch: int = 512
    apart: bool = False
    stages: int = 2
    sigma: float = SIGMA

    @property
    def engines(self) -> int:
        return self.gpus // 2 if self.apart else self.gpus

    @property
    def replicas(self) -> int:
        return self.engines // self.stages

    @property
    def peak(self) -> Gpu:
        return KNOWN[self.gpu]

    @cached_property
    def shape(self) -> ModelShape:
        layers = LAYERS.get(self.engines, 32)
        return replace(find_shape(PUBLISHED), layers=layers, dense_layers=layers)

    @cached_property
    def lengths(self) -> list[int]:
        return dealt(1, 64 * self.gpus // 8 * SAMPLES, MEAN, self.sigma, MOST)


VARIANTS = {
    "8 x H100, batches of 512": Variant("H100"),
    "8 x H100, batches of 2,048": Variant("H100", batch=2048),
    "4 + 4 x H100, one step off, 512": Variant("H100", apart=True),
    TARGET: Variant("H200"),
    "8 x H200, batches of 2,048": Variant("H200", batch=2048),
    "8 x H200, 512, no pipeline": Variant("H200", stages=1),
    "8 x H200, 512, sigma 0.5": Variant("H200", sigma=0.5),
    "2 x H100, 128, 16 layers": Variant("H100", gpus=2),
    "1 + 1 x H100, one step off, 128, 8 layers": Variant("H100", gpus=2, apart=True, stages=1),
    "1 x H100, 64, 8 layers": Variant("H100", gpus=1, stages=1),
}


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    rates = shown()
    results = [record.result(what, "NeMo-RL, 8 x H100, published", "s", [seconds]) for what, seconds in THEIRS.items()]
    for name, variant in VARIANTS.items():
        results += step(name, variant, rates)
    of_target = next(one["median"] for one in results if one["config"] == TARGET and one["name"] == "whole step")
    bars = [record.bar(f"whole step, {TARGET}, s", of_target, TARGET_S, at_least=False)]
    print(record.write("published-row-simulated", results, bars, f"Simulated. {rates}"))


def step(name: str, variant: Variant, rates: Rates) -> Iterator[dict[str, Any]]:
    """Yield the rows of the record: seconds of a step and of its phases, and what they are lost to."""
    engines = [generation(variant.lengths[one :: variant.engines], variant, rates) for one in range(variant.engines)]
    sampled, tail = max(engines)
    train, logprob = (policy(variant, rates, training) for training in (True, False))
    parameters = parameter_count(variant.shape)
    swap = 3 * 2 * parameters / variant.stages / rates.copies
    # Float32 gradients to their owners, bfloat16 weights back, after each optimizer step.
    sent = (1 - 1 / variant.replicas) * (4 + 2) * parameters / variant.stages
    exchange = 2048 // variant.batch * sent / RATE_INSIDE
    refit = REFIT_APART_S + 2 * parameters / RATE_INSIDE if variant.apart else rates.refit_s
    worked = logprob[0] + swap + train[0] + exchange
    whole = refit + (max(sampled, worked) if variant.apart else sampled + worked)
    for what, seconds in {
        "whole step": whole,
        "generation": sampled,
        "of it with a quarter of the responses or fewer": tail,
        "engines wait": sampled - fmean(seconds for seconds, _ in engines),
        "logprob": logprob[0] + swap,
        "of it reference swapped": swap,
        "train": train[0] + exchange,
        "of it exchanged between replicas": exchange,
        "stages idle": train[1] + logprob[1],
        "replicas wait": train[2] + logprob[2],
        "refit": refit,
    }.items():
        yield record.result(what, name, "s", [seconds])
    rate = len(variant.lengths) * (PROMPT + MEAN) / whole / variant.gpus
    yield record.result("tokens a second and GPU", name, "1/s", [rate])


def generation(lengths: Sequence[int], variant: Variant, rates: Rates) -> tuple[float, float]:
    """Seconds of an engine, and those in which a quarter of its responses or fewer run. Each engine has some of each
    prompt's samples, and computes every prompt."""
    count = running(lengths)
    own = np.where(np.isin(np.arange(1, len(count) + 1), lengths), rates.ending_step_s, rates.step_s)
    seconds = reading(variant.peak, variant.shape, lengths, PROMPT) + own * count / REQUESTS
    prompts = len(variant.lengths) // SAMPLES * forward_flops(variant.shape, PROMPT)
    late = count * 4 <= len(lengths)
    return float(seconds.sum()) + prompts / (rates.logprob * variant.peak.flops), float(seconds[late].sum())


def policy(variant: Variant, rates: Rates, training: bool) -> tuple[float, ...]:
    """Seconds of training on all rows, or of their logprobs: the reference's of all, the policy's of those after the
    first optimizer step. Of them, those in which stages are idle, and those in which replicas wait for the slowest."""
    layout, shape = Layout("packed", 4096 if training else LOGPROB_PACK, 64), variant.shape
    batch, batches = variant.batch * variant.gpus // 8, []
    for start in range(0, len(variant.lengths), batch):
        rows = [PROMPT + length for length in variant.lengths[start : start + batch]]
        shares = balanced_shares(rows, variant.replicas, lambda tokens: forward_flops(shape, tokens), layout=layout)
        batches.append([[rows[row] for row in share] for share in shares])
    if not training:
        passes = [part for part in (batches, batches[1:]) if part]
        batches = [[list(chain(*own)) for own in zip(*part, strict=True)] for part in passes]
    rate = (rates.training if training else rates.logprob) * variant.peak.flops
    found = []
    for shares in batches:
        # All replicas make as many micro-batches.
        count = max(len(layout.groups(own)) for own in shares)
        packs = [[[own[row] for row in group] for group in layout.groups(own, count)] for own in shares]
        each = [pipeline(of_replica, variant, training, rate) for of_replica in packs]
        slowest = max(whole for whole, _ in each)
        found.append((slowest, fmean(idle for _, idle in each), slowest - fmean(whole for whole, _ in each)))
    return tuple(map(sum, zip(*found, strict=True)))


def pipeline(packs: list[list[int]], variant: Variant, training: bool, rate: float) -> tuple[float, float]:
    """Seconds of a replica of one stage or two, and those in which a stage is idle, on average. As in megatron-core's
    schedule, the first stage of two is one micro-batch ahead of the second."""
    shape, stages, times = variant.shape, variant.stages, []
    least = shape.layers / stages * LAUNCH_S
    for pack in packs:
        vocabulary = 2 * shape.vocabulary * shape.hidden * sum(pack)
        layers = (sum(forward_flops(shape, tokens) for tokens in pack) - vocabulary) / stages
        flops = (layers, layers + vocabulary) if stages == 2 else (0.0, layers + vocabulary)
        times.append([(max(least, one / rate), max(least, 2 * one / rate) if training else 0.0) for one in flops])
    if stages == 1:
        return sum(map(sum, (own for _, own in times))), 0.0
    first = ended = 0.0
    for place, ((forward, _), last) in enumerate(times):
        first, before = first + forward, ended
        ended = max(ended, first) + sum(last)
        if training and place:
            first = max(first, before) + times[place - 1][0][1]
    whole = max(first, ended) + times[-1][0][1]
    return whole, whole - sum(sum(map(sum, both)) for both in times) / stages


if __name__ == "__main__":
    main()
