"""Rates that one GPU or two have shown, read from records in docs/benchmarks/, for simulations of other layouts.

- Training and logprob passes reach the MFU of published-row-1-512: eight layers of the same model on one H100.
- Decoding reads at planning/time.py's `READS` of the bandwidth. On top of that a step takes what
  speed-ablation-large-kept leaves for it, and a step in which a response ends what async-rate-2x-h100 leaves, where all
  steps took vLLM's own way through its scheduler. Both contain the sampler, there for up to `REQUESTS` requests; with
  fewer requests, a step takes a share of it.
- A refit takes what it took in published-row-1-512, with the engine's awakening; weights move between a GPU and its
  host at the rate of offload-copies.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log

import numpy as np
import record
from plan_check import shape_of

from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.gpus import KNOWN, Gpu
from nemo_rl_lite.planning.memory import matrix_weights
from nemo_rl_lite.planning.time import READS

# Of both records: requests of the engine, most tokens of a response, and about those of a prompt. The responses of
# async-rate are geometric, with this mean before they are cut.
REQUESTS, NEW, SHORT_PROMPT, GEOMETRIC = 512, 512, 40, 200


@dataclass(frozen=True)
class Rates:
    """What GPUs have shown: shares of the peak, seconds, bytes/s."""

    training: float
    logprob: float
    step_s: float
    ending_step_s: float
    refit_s: float
    copies: float


def shown() -> Rates:
    """Read the rates from the records."""
    kept, model, gpu = "speed-ablation-large-kept-1x-h100", shape_of("qwen3-1.7b"), KNOWN["H100"]
    share, row = medians(kept, "bandwidth share of decoding")[0], "published-row-1-512-1x-h100"
    geometric = [min(NEW, ceil(log(1 - (one + 0.5) / REQUESTS) / log(1 - 1 / GEOMETRIC))) for one in range(REQUESTS)]
    apart = medians("async-rate-2x-h100", "policy waits for a rollout")[0]
    return Rates(
        training=medians(row, "MFU of training")[0],
        logprob=medians(row, "MFU of logprobs")[0],
        step_s=medians(kept, "generation")[0] * (1 - share / READS) / NEW,
        ending_step_s=(apart - float(reading(gpu, model, geometric, SHORT_PROMPT).sum())) / NEW,
        refit_s=medians(row, "refit")[0],
        copies=medians("offload-copies-1x-h100", "ours, to host")[0] * 1e9,
    )


def medians(bench: str, name: str) -> list[float]:
    """The medians of a quantity in a record, one for each setting."""
    rows = json.loads((record.FOLDER / f"{bench}.json").read_text())["results"]
    return [row["median"] for row in rows if row["name"] == name]


def running(lengths: Sequence[int]) -> np.ndarray:
    """How many responses run in each step of an engine that begins all of them together."""
    return len(lengths) - np.searchsorted(np.sort(lengths), np.arange(1, max(lengths) + 1))


def reading(gpu: Gpu, shape: ModelShape, lengths: Sequence[int], prompt: int) -> np.ndarray:
    """Seconds of reading weights and caches, in bfloat16, in each step of an engine."""
    count = running(lengths)
    cached = count * (prompt + np.arange(1, len(count) + 1)) * 2 * shape.layers * shape.kv_heads * shape.head_dim
    return 2 * (matrix_weights(shape, shape.experts) + cached) / (READS * gpu.bandwidth)
