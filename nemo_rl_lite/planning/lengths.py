"""Assumed lengths of a step's sequences, and how evenly data-parallel replicas share them.

A replica is never faster than its longest sequence. With few sequences each, most replicas wait for the one that has
the longest, so this assumes a distribution: lognormal responses, cut at the longest.
"""

from dataclasses import dataclass
from functools import cache
from math import exp
from statistics import NormalDist, fmean

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.models.flops import forward_flops
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.policy.balance import even_work, split_longest

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
    prompts have half of the remaining length. Without rollouts, sequences have half of the maximum."""
    if not generates(config):
        return Lengths(0, config.policy.max_total_sequence_length / 2, config.policy.max_total_sequence_length)
    longest = config.generation.max_new_tokens
    room = max(2, config.policy.max_total_sequence_length - longest)
    return Lengths(room / 2, longest / 2 if mean is None else mean, longest)


@cache
def slowest_replica(shape: ModelShape, lengths: Lengths, sequences: int, replicas: int) -> float:
    """Return the FLOPs of the replica with the most, as a multiple of the mean."""
    if lengths.mean >= lengths.longest or sequences < replicas:
        return 1.0
    _, costs = _sequences(shape, lengths, sequences)
    work = [sum(costs[index] for index in share) for share in even_work(costs, replicas)]
    return max(work) / fmean(work)


@cache
def shared_work(shape: ModelShape, lengths: Lengths, sequences: int, replicas: int, ranks: int, most: int) -> float:
    """Return the share of the FLOPs in sequences that context-parallel `ranks` split, if one has up to `most` tokens
    whole (`hybrid_context_parallel`)."""
    if lengths.mean >= lengths.longest:
        return 1.0
    tokens, costs = _sequences(shape, lengths, sequences)
    shared = 0.0
    for share in even_work(costs, replicas):
        own = [costs[index] for index in share]
        longest, _ = split_longest(own, ranks, [tokens[index] > most for index in share])
        shared += sum(own[place] for place in longest)
    return shared / sum(costs)


def mean_square(lengths: Lengths, responses: int) -> float:
    """Return the mean of the squared lengths of `responses`: a long one reads its cache more often than its tokens."""
    if lengths.mean >= lengths.longest:
        return lengths.mean**2
    found = quantiles(responses, max(1.0, lengths.mean), SIGMA, round(lengths.longest))
    return fmean(one * one for one in found)


def _sequences(shape: ModelShape, lengths: Lengths, count: int) -> tuple[list[float], list[float]]:
    """Return the tokens of sequences with these lengths, and their FLOPs."""
    responses = quantiles(count, max(1.0, lengths.mean), SIGMA, round(lengths.longest))
    tokens = [lengths.prompt + one for one in responses]
    return tokens, [forward_flops(shape, one) for one in tokens]


@cache
def quantiles(count: int, mean: float, sigma: float, most: int) -> tuple[int, ...]:
    """Return `count` lengths of 1 to `most` tokens in ascending order: even quantiles of a lognormal distribution.

    After the cut at `most` they have this mean. Raises ValueError: none have it.
    """
    if not 1 <= mean <= most:
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
