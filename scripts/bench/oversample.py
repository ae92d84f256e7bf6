"""How long dynamic sampling takes by `algorithm.oversample`: oversample.py [--prompts 64] [--samples 8] [--repeats 5]

An engine that computes nothing answers each request after a time with a lognormal distribution (median 0.1 s, sigma
0.3), however many are under way, which is what a small model on a GPU does. A share of the prompts teaches. Measured
are the seconds of a rollout, and how many prompts were begun for each that a rollout has looked at, which is what
beginning early costs. The first rollout, before which nothing tells the share, is not counted. What rollouts keep is
compared, and must be the same.
"""

import argparse
import asyncio
import random
import time
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import record

from nemo_rl_lite.config.sections.algorithm import GRPOConfig
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutCollector
from nemo_rl_lite.rollout.sampler import PromptCooldown, PromptOrder, Sampler
from nemo_rl_lite.rules.compose import compose_config
from tests.unit.rollout.script import Letters, judged_by

WAYS: dict[str, float | str] = {"1": 1.0, "1.5": 1.5, "4": 4.0, "auto": "auto"}
SHARES = (0.1, 0.3, 0.6)
MEDIAN_S, SIGMA = 0.1, 0.3
WRONG, RIGHT = ord("0"), ord("1")


class Engine:
    """Answers right to some samples of the prompts that teach, and wrong to all of the others."""

    def __init__(self, share: float):
        self._share, self.begun = share, 0

    @asynccontextmanager
    async def serving(self) -> Any:
        yield self

    def together(self) -> Any:
        return nullcontext()

    async def sample(self, request: Any, near: Any = None) -> tuple[Completion, int]:
        self.begun += 1
        of_prompt, of_sample = random.Random(str(request.prompt)), random.Random(str(request.seed))
        teaches = of_prompt.random() < self._share
        await asyncio.sleep(MEDIAN_S * of_sample.lognormvariate(0, SIGMA))
        token = RIGHT if teaches and of_sample.random() < 0.5 else WRONG
        return Completion((token, 0), (-0.5, -0.5), "stop", (0, 0)), 0


class Endless:
    """A training set without an end."""

    def problem(self, position: int) -> Problem:
        return Problem(chat(f"prompt {position}"), "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    results = []
    for share in SHARES:
        kept = set()
        for name, oversample in WAYS.items():
            seconds, begun, positions = rollouts(share, oversample, given)
            kept.add(positions)
            setting = f"{share:.0%} of the prompts teach, oversample={name}"
            print(f"{setting}: {seconds} s, begun for each looked at {begun}", flush=True)
            results.append(record.result("a rollout", setting, "s", seconds))
            results.append(record.result("prompts begun for each looked at", setting, "", begun))
        if len(kept) != 1:
            raise SystemExit(f"at {share:.0%} the settings kept different prompts")
    note = f"{given.prompts} prompts x {given.samples} samples; an engine that computes nothing answers after 0.1 s."
    print(record.write("rollouts-oversample", results, [], note))


def rollouts(
    share: float, oversample: float | str, given: argparse.Namespace
) -> tuple[list[float], list[float], tuple[str, ...]]:
    """The seconds of each rollout, the prompts begun for each that it looked at, and what all rollouts kept."""
    options = compose_config([f"algorithm.num_generations_per_prompt={given.samples}"]).options(GRPOConfig)
    own: dict[str, Any] = {"num_prompts_per_step": given.prompts, "oversample": oversample}
    options = replace(options, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=40, **own)
    engine = Engine(share)
    judge = judged_by(lambda response, problem: float(response[:1] == problem.answer))
    collector = RolloutCollector(engine, Letters(), judge, 64, ErrorShares(0, 0))
    order = PromptOrder(Endless(), PromptCooldown(0, 0), {"position": 0})
    sampler = Sampler(options, collector, Sampling(1.0, 1.0, None, 8, (0,), ()), [], order)
    seconds, begun, kept = list[float](), list[float](), list[str]()
    for step in range(given.repeats + 1):
        before, began = engine.begun, time.perf_counter()
        rollout = sampler.rollout(step)
        seconds.append(round(time.perf_counter() - began, 3))
        begun.append(round((engine.begun - before) / given.samples / len(rollout.taught), 3))
        kept += [episode.problem.messages[0]["content"] for episode in rollout.episodes]
    return seconds[1:], begun[1:], tuple(kept)


if __name__ == "__main__":
    main()
