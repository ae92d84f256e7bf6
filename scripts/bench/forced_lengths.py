"""Train with responses of forced lengths: forced_lengths.py MEAN SIGMA [override ...]

As `nrl-lite train`, but a response ends when it has its own number of tokens, and never before. The N responses of a
step have the lengths of N even quantiles of a lognormal distribution (SIGMA: standard deviation of the logarithm), cut
at generation.max_new_tokens, with MEAN as their mean after that. Each step deals the same lengths to other responses.
For random weights, whose responses would have lengths without a meaning.
"""

import random
import sys
from dataclasses import replace
from functools import cache
from math import exp
from statistics import NormalDist, fmean

from nemo_rl_lite import train
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import samples_per_step
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.play import Assistant, SingleTurn
from nemo_rl_lite.rules.compose import compose_command
from nemo_rl_lite.run.flags import split_arguments


def quantiles(count: int, mean: float, sigma: float, most: int) -> list[int]:
    """The lengths of `count` responses, in ascending order. Raises ValueError: none have this mean."""
    if not 1 <= mean < most:
        raise ValueError(f"a mean of {mean:g} tokens is not possible with 1 to {most} tokens")
    spread = [NormalDist(0, sigma).inv_cdf((place + 0.5) / count) for place in range(count)]
    shortest, longest = 0.0, float(most)

    def lengths(median: float) -> list[int]:
        return [max(1, min(most, round(median * exp(one)))) for one in spread]

    # The mean rises with the median, which is found by halving.
    for _ in range(60):
        median = (shortest + longest) / 2
        shortest, longest = (median, longest) if fmean(lengths(median)) < mean else (shortest, median)
    return lengths(longest)


@cache
def dealt(seed: int, count: int, mean: float, sigma: float, most: int) -> list[int]:
    """The lengths of a step's responses, by their numbers. The seed is the step's."""
    lengths = quantiles(count, mean, sigma, most)
    random.Random(seed).shuffle(lengths)
    return lengths


def force(mean: float, sigma: float, samples: int, count: int) -> None:
    """Make single-turn episodes of this process as long as `dealt` says: `samples` of a prompt, `count` of a step."""

    async def play(self: SingleTurn, episode: Episode, assistant: Assistant) -> None:
        seed, prompt, sample = assistant.seeds
        own = dealt(seed, count, mean, sigma, assistant.sampling.max_new_tokens)[prompt * samples + sample]
        await assistant.respond(sampling=replace(assistant.sampling, max_new_tokens=own, stop_token_ids=()))

    SingleTurn.play = play  # type: ignore[method-assign]


def main() -> None:
    mean, sigma, *arguments = sys.argv[1:]
    config = compose_command(split_arguments(arguments)[1])
    samples = config.options(RolloutAlgorithmConfig).num_generations_per_prompt
    force(float(mean), float(sigma), samples, samples_per_step(config))
    train.main(arguments)


if __name__ == "__main__":
    main()
