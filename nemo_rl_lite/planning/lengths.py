"""Assumed lengths of a step's sequences, and how evenly data-parallel replicas share them.

A replica is never faster than its longest sequence. With few sequences each, most replicas wait for the one that has
the longest, so this assumes a distribution: lognormal responses, cut at the longest.
"""

from dataclasses import dataclass
from functools import cache
from math import exp
from statistics import NormalDist, fmean

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.models.flops import forward_flops
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.policy.balance import even_work

# Standard deviation of the logarithm of a response's length.
SIGMA = 1.0


@dataclass(frozen=True)
class Lengths:
    """Tokens of a step's sequences. `prompt`: mean, with an environment's turns; `mean`, `longest`: responses."""

    prompt: float
    mean: float
    longest: float


def assumed_lengths(config: Config, mean: float | None = None) -> Lengths:
    """Assume lengths before a run. Responses have half of `max_new_tokens` without `mean`, the longest has all, and
    prompts have half of the remaining length."""
    longest = config.generation.max_new_tokens
    room = max(2, config.policy.max_total_sequence_length - longest)
    return Lengths(room / 2, longest / 2 if mean is None else mean, longest)


@cache
def slowest_replica(shape: ModelShape, lengths: Lengths, sequences: int, replicas: int) -> float:
    """Return the FLOPs of the replica with the most, as a multiple of the mean."""
    if lengths.mean >= lengths.longest or sequences < replicas:
        return 1.0
    responses = quantiles(sequences, max(1.0, lengths.mean), SIGMA, round(lengths.longest))
    costs = [forward_flops(shape, lengths.prompt + one) for one in responses]
    work = [sum(costs[index] for index in share) for share in even_work(costs, replicas)]
    return max(work) / fmean(work)


@cache
def quantiles(count: int, mean: float, sigma: float, most: int) -> tuple[int, ...]:
    """Return `count` lengths of 1 to `most` tokens in ascending order: even quantiles of a lognormal distribution.

    After the cut at `most` they have this mean. Raises ValueError: none have it.
    """
    if not 1 <= mean < most:
        raise ValueError(f"a mean of {mean:g} tokens is not possible with 1 to {most} tokens")
    factors = [exp(NormalDist(0, sigma).inv_cdf((place + 0.5) / count)) for place in range(count)]
    shortest, longest = 0.0, float(most) / factors[0]

    def lengths(median: float) -> list[int]:
        return [max(1, min(most, round(median * one))) for one in factors]

    # The mean rises with the median, which is found by halving.
    for _ in range(60):
        median = (shortest + longest) / 2
        shortest, longest = (median, longest) if fmean(lengths(median)) < mean else (shortest, median)
    return tuple(lengths(longest))
