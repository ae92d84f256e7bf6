"""Score given samples by a reward: variance, mixed groups, correlation with length, time."""

import asyncio
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_lite.config.schema import RewardConfig
from nemo_rl_lite.data.problems import Problem, TrainingSet, chat
from nemo_rl_lite.data.rows import column
from nemo_rl_lite.rewards.checkup import Finding, brief, judged
from nemo_rl_lite.rewards.judge import Judge

# Correlation with length that is a note, and the number of samples that it needs.
_STRONG, _ENOUGH = 0.5, 20
# Share of mixed groups below which most of the rollout is wasted.
_FEW = 0.1


@dataclass(frozen=True)
class Sample:
    """A response to a problem. Samples of a `group` are compared in a step."""

    problem: Problem
    response: str
    group: tuple[object, ...]


@dataclass(frozen=True)
class SampleStatistics:
    """Statistics of the rewards of samples.

    `mixed`: share of the groups of several samples whose rewards differ; None without such groups. `untrained`: share
    of the characters in groups of equal rewards, which have no advantage. `length_correlation`: of reward and
    characters, None if either is constant. `seconds`: median time of a call.
    """

    samples: int
    failed: int
    mean: float | None
    deviation: float | None
    groups: int
    mixed: float | None
    untrained: float | None
    length_correlation: float | None
    seconds: float | None


def read_samples(
    rows: Iterable[tuple[str, Mapping[str, Any]]], training: TrainingSet[Problem], system_prompt: str | None
) -> list[Sample]:
    """Convert rows with `prompt`, `response` and perhaps `answer`, such as a run's rollouts. A prompt of the training
    set brings the columns of its row.

    Raises:
        DataError: a row lacks a column, or its prompt is invalid.
    """
    read = []
    for where, row in rows:
        prompt, response = column(row, "prompt", where), column(row, "response", where)
        messages = chat(prompt, system_prompt, where)
        read.append((Problem(messages, str(row.get("answer") or ""), dict(row)), str(response or ""), row))
    prompts = {_key(problem) for problem, _, _ in read}
    known = {_key(one): one for one in training.finite() or map(training.problem, range(len(prompts)))}
    found = []
    for problem, response, row in read:
        own = known.get(_key(problem), problem)
        # The prompts of a group may differ: agents change histories.
        group = (row["step"], row["problem"]) if {"step", "problem"} <= row.keys() else _key(problem)
        found.append(Sample(replace(own, answer=problem.answer or own.answer), response, group))
    return found


def _key(problem: Problem) -> tuple[tuple[str, str], ...]:
    return tuple((one["role"], one["content"]) for one in problem.messages)


def score_samples(
    judge: Judge, samples: Sequence[Sample], config: RewardConfig, limit_s: float
) -> tuple[SampleStatistics, list[Finding]]:
    """Score the samples, and tell what would hurt training. No call starts after `limit_s` seconds."""
    tried = asyncio.run(judged(judge, [(one.response, one.problem) for one in samples], config, limit_s))
    skipped = tried.count(None)
    samples = [sample for sample, one in zip(samples, tried, strict=True) if one is not None]
    scored = [one for one in tried if one is not None]
    valid = [(sample, reward) for sample, (reward, _, _) in zip(samples, scored, strict=True) if reward is not None]
    rewards = [reward for _, reward in valid]
    groups = defaultdict[tuple[object, ...], list[tuple[Sample, float]]](list)
    for sample, reward in valid:
        groups[sample.group].append((sample, reward))
    several = [own for own in groups.values() if len(own) > 1]
    equal = [own for own in several if len({reward for _, reward in own}) == 1]
    characters = sum(len(sample.response) for own in several for sample, _ in own)
    wasted = sum(len(sample.response) for own in equal for sample, _ in own)
    found = SampleStatistics(
        samples=len(samples),
        failed=len(samples) - len(valid),
        mean=statistics.fmean(rewards) if rewards else None,
        deviation=statistics.pstdev(rewards) if rewards else None,
        groups=len(several),
        mixed=1 - len(equal) / len(several) if several else None,
        untrained=wasted / characters if characters else None,
        length_correlation=_correlation([len(sample.response) for sample, _ in valid], rewards),
        seconds=statistics.median(seconds for _, seconds, _ in scored) if scored else None,
    )
    failed = [(sample, error) for sample, (_, _, error) in zip(samples, scored, strict=True) if error]
    return found, list(_findings(found, failed, skipped))


def _correlation(lengths: Sequence[int], rewards: Sequence[float]) -> float | None:
    if len(set(lengths)) < 2 or len(set(rewards)) < 2:
        return None
    value = statistics.correlation(lengths, rewards)
    return value if math.isfinite(value) else None


def _findings(found: SampleStatistics, failed: Sequence[tuple[Sample, str]], skipped: int) -> Iterator[Finding]:
    if skipped:
        yield Finding(
            "the samples", f"{skipped} samples were not scored in the time", "a larger --seconds", level="note"
        )
    if failed:
        sample, error = failed[0]
        what = f"the reward fails for {len(failed)} of {found.samples} samples: {' '.join(error.split())}"
        fix = "return 0 for a response that cannot be read: a failed sample is not trained on"
        yield Finding("the samples", what, fix, brief(sample.response))
    if found.deviation == 0 and found.samples > 1:
        what = f"all samples have the reward {found.mean:g}, so no step trains"
        yield Finding("the samples", what, "choose problems that the model sometimes solves, or give partial rewards")
    elif found.mixed is not None and found.mixed < _FEW:
        what = f"rewards differ in {found.mixed:.0%} of the groups; {found.untrained:.0%} of the text trains nothing"
        fix = "choose easier or harder problems, or more samples of each (algorithm.num_generations_per_prompt)"
        yield Finding("the samples", what, fix, level="note")
    correlation = found.length_correlation
    if correlation is not None and abs(correlation) > _STRONG and found.samples >= _ENOUGH:
        longer = "longer" if correlation > 0 else "shorter"
        what = f"{longer} samples have higher rewards: the correlation with length is {correlation:.2f}"
        yield Finding("the samples", what, "check that length is not what the reward measures", level="note")
