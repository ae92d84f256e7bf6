"""Judge one response at a time: in this process, or in others with a time limit for each."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_rl_lite.config.sections.data import RewardConfig
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.host.pool import CallError, CallPool, LateError, StartError, Target
from nemo_rl_lite.rewards.batches import Batches
from nemo_rl_lite.rewards.registry import INSTANT, WRONG_WHERE_LATE
from nemo_rl_lite.rewards.terms import Parts, RewardCalls, Term, terms_of
from nemo_rl_lite.rewards.value import LateReward, RewardError, UnavailableReward, WrongReward


@dataclass(frozen=True)
class Judged:
    """The reward of a response and, where it is a sum, its parts by name, before their weights. `late`: why it is 0,
    though nothing was computed."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    late: LateReward | None = None


Verdict = Judged | RewardError
"""A reward, or the error that prevented it."""

Judge = Callable[[str, Problem], Awaitable[Verdict]]
"""Judges a response to a problem. Many may be judged at a time."""


def make_judge(config: RewardConfig) -> Judge:
    """Return the judge for the configured reward.

    Raises:
        ConfigError: there is no such reward, or it does not take its kwargs.
    """
    terms = terms_of(config)
    here = RewardCalls(terms)
    if config.timeout_s is None or all(term.name in INSTANT for term in terms):
        return sum_of(terms, here, at_once=sys.maxsize)
    return sum_of(terms, _RemoteCalls(config, terms), at_once=config.processes * config.concurrency)


class Calls(Protocol):
    """`RewardCalls`, here or in other processes."""

    async def one(self, response: str, problem: Problem) -> Parts:
        """See `RewardCalls.one`."""
        ...

    async def batch(
        self, label: str, responses: Sequence[str], problems: Sequence[Problem]
    ) -> Sequence[float | RewardError]:
        """See `RewardCalls.batch`."""
        ...


def sum_of(terms: Sequence[Term], calls: Calls, at_once: int) -> Judge:
    """The judge that adds up the terms. Each term with a `batch_size` collects its own batches."""
    sources = [calls.one] if any(term.batch_size is None for term in terms) else []
    sources += [_batched(term.label, term.batch_size, calls, at_once) for term in terms if term.batch_size is not None]

    async def judge(response: str, problem: Problem) -> Verdict:
        parts = dict[str, float]()
        for found in await asyncio.gather(*(source(response, problem) for source in sources)):
            if isinstance(found, LateReward):
                return Judged(0.0, dict.fromkeys((term.label for term in terms), 0.0) if len(terms) > 1 else {}, found)
            if isinstance(found, RewardError):
                return found
            parts |= found
        total = 0.0
        for term in terms:
            total += term.weight * parts[term.label]
        return Judged(total, {term.label: parts[term.label] for term in terms} if len(terms) > 1 else {})

    return judge


def _batched(label: str, size: int, calls: Calls, at_once: int) -> Callable[[str, Problem], Awaitable[Parts]]:
    batches = Batches(lambda responses, problems: calls.batch(label, responses, problems), size, at_once)

    async def judge(response: str, problem: Problem) -> Parts:
        found = await batches(response, problem)
        return found if isinstance(found, RewardError) else {label: found}

    return judge


class _RemoteCalls:
    """Calls in at most `reward.processes` processes, each call within `reward.timeout_s`."""

    def __init__(self, config: RewardConfig, terms: Sequence[Term]):
        path = f"{RewardCalls.__module__}.{RewardCalls.__qualname__}"
        self._name = config.name
        self._wrong_where_late = all(term.name in WRONG_WHERE_LATE for term in terms)
        target = Target(path, {"terms": terms}, "the judging process", "reward.timeout_s")
        self._pool = CallPool(target, config.processes, config.concurrency, config.timeout_s)

    async def one(self, response: str, problem: Problem) -> Parts:
        """See `RewardCalls.one`. Raises DataError: the processes do not start."""
        try:
            return await self._call("one", response, problem)
        except CallError as error:
            is_wrong = isinstance(error, LateError) and self._wrong_where_late
            return (LateReward if is_wrong else RewardError)(str(error), error.details)

    async def batch(
        self, label: str, responses: Sequence[str], problems: Sequence[Problem]
    ) -> Sequence[float | RewardError]:
        """See `RewardCalls.batch`. Raises DataError: the processes do not start."""
        try:
            return await self._call("batch", label, responses, problems)
        except CallError as error:
            return [RewardError(str(error), error.details)] * len(responses)

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Raises CallError: there is no result."""
        try:
            return await asyncio.wrap_future(self._pool.submit(method, *arguments))
        except StartError as error:
            raise DataError(f"reward.name = {self._name}: {error}") from error


def try_reward(judge: Judge, problem: Problem) -> None:
    """Judge one sample before a run starts anything: the problem's own answer, as the response. Where that fails, say
    so: the error may be due to this response.

    Raises:
        ConfigError: the reward returns what is no reward, or what it asks is not there.
    """

    async def trial() -> Verdict:
        return await judge(problem.answer or "", problem)

    verdict = asyncio.run(trial())
    said = verdict.late if isinstance(verdict, Judged) else verdict
    if isinstance(said, UnavailableReward):
        fix = f"start what it asks, or correct {said.section}.kwargs; every sample would be without a reward"
        raise ConfigError([Violation(f"{said.section}.name", None, str(said), fix)])
    if isinstance(said, WrongReward):
        fix = "return one number for one response; with batch_size, a list with one number for each response"
        sample = f"on the response {problem.answer!r} to {problem.messages[-1]['content']!r:.80}"
        raise ConfigError([Violation(f"{said.section}.name", None, f"{said} ({sample})", fix)])
    if isinstance(said, RewardError):
        told = " ".join(str(said).split())
        sys.stderr.write(f"note: a trial call of the reward failed: {told}; such samples are left out\n")
