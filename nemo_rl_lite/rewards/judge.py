"""Score responses by the weighted sum of the configured rewards, in this process or in others with a time limit."""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_rl_lite.config.user_code import own_name
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.rewards.registry import (
    INSTANT,
    WRONG_IF_LATE,
    FaultyReward,
    LateReward,
    RewardError,
    UnavailableReward,
    WrongReward,
    find_batch_reward,
    find_reward,
)
from nemo_rl_lite.system.pool import CallPool, CallTimeout, PoolTarget
from nemo_rl_lite.system.user_errors import CallError, as_call_error

if TYPE_CHECKING:
    from nemo_rl_lite.config.schema import RewardConfig

# Seconds that an incomplete batch waits for more responses.
_WAIT_S = 0.05
Parts = dict[str, float] | RewardError
"""Rewards by the label of their term, or an error."""


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response, the unweighted parts of a sum by label, and the timeout that made it 0."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    late: LateReward | None = None


RewardOutcome = RewardResult | RewardError
Judge = Callable[[str, Problem], Awaitable[RewardOutcome]]
"""Scores a response to a problem. Calls may overlap."""


@dataclass(frozen=True)
class Term:
    """One term of a reward; `name`, `kwargs` and `section` as in `find_reward`."""

    label: str
    name: str
    kwargs: Mapping[str, Any]
    weight: float
    section: str
    batch_size: int | None = None


def terms_of(config: "RewardConfig") -> list[Term]:
    """Return the configured reward with weight 1, and the terms that are added to it."""
    found = [Term(own_name(config.name), config.name, config.kwargs, 1.0, "reward", config.batch_size)]
    for label, one in config.terms.items():
        found.append(Term(label, one.name, one.kwargs, one.weight, f"reward.terms.{label}", one.batch_size))
    return found


class RewardCalls:
    """Calls the rewards of the terms in this process. Errors become `RewardError`s."""

    def __init__(self, terms: Sequence[Term]):
        """Raises ConfigError: there is no such reward."""
        self._terms = {term.label: term for term in terms}
        self._single, self._batched = dict[str, Any](), dict[str, Any]()
        for term in terms:
            kind, find = (self._single, find_reward) if term.batch_size is None else (self._batched, find_batch_reward)
            kind[term.label] = find(term.name, term.kwargs, term.section)

    async def one(self, response: str, problem: Problem) -> Parts:
        """Score a response by the terms that are not batched."""
        parts = dict[str, float]()
        for label, reward in self._single.items():
            part = await self._called(label, reward, response, problem)
            if isinstance(part, RewardError):
                return part
            parts[label] = part
        return parts

    async def batch(
        self, label: str, responses: Sequence[str], problems: Sequence[Problem]
    ) -> Sequence[float | RewardError]:
        """Score responses by the batched term `label`. An error of the call counts for each response."""
        found = await self._called(label, self._batched[label], responses, problems)
        return [found] * len(responses) if isinstance(found, RewardError) else found

    async def _called(self, label: str, reward: Callable[..., Any], *arguments: Any) -> Any:
        try:
            value = reward(*arguments)
            return await value if inspect.isawaitable(value) else value
        except RewardError as error:
            failure = error
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raised = as_call_error(error)
            kind = FaultyReward if raised.is_fault else RewardError
            failure = kind(f"{raised}{raised.place}", raised.details)
        failure.section = self._terms[label].section
        return failure


@dataclass(eq=False)
class _WaitingResponse:
    response: str
    problem: Problem
    reward: asyncio.Future


class Batches:
    """Passes waiting responses to `judge` in batches of at most `size`, in at most `at_once` concurrent calls."""

    def __init__(
        self,
        judge: Callable[[Sequence[str], Sequence[Problem]], Awaitable[Sequence[float | RewardError]]],
        size: int,
        at_once: int,
    ):
        self._judge, self._size, self._at_once = judge, size, at_once
        self._waiting: list[_WaitingResponse] = []
        self._workers: set[asyncio.Task] = set()

    async def __call__(self, response: str, problem: Problem) -> float | RewardError:
        """Score a response in a batch. Raises what `judge` raises."""
        own = _WaitingResponse(response, problem, asyncio.get_running_loop().create_future())
        self._waiting.append(own)
        # Workers of an earlier event loop are done.
        self._workers = {worker for worker in self._workers if not worker.done()}
        if len(self._workers) < self._at_once:
            self._workers.add(asyncio.create_task(self._work()))
        try:
            return await own.reward
        finally:
            # The episode was cancelled.
            if own in self._waiting:
                self._waiting.remove(own)

    async def _work(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._size:
                await asyncio.sleep(_WAIT_S)
            batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
            if batch:
                await self._resolve(batch)

    async def _resolve(self, batch: Sequence[_WaitingResponse]) -> None:
        try:
            rewards = await self._judge([one.response for one in batch], [one.problem for one in batch])
        except Exception as error:  # reaches the waiting callers
            for one in batch:
                if not one.reward.done():
                    one.reward.set_exception(error)
            return
        for one, reward in zip(batch, rewards, strict=True):
            if not one.reward.done():
                one.reward.set_result(reward)


def make_judge(config: "RewardConfig") -> Judge:
    """Return the function that scores by the configured reward. Raises ConfigError: there is no such reward, or it does
    not take its kwargs."""
    terms = terms_of(config)
    here = RewardCalls(terms)
    if config.timeout_s is None or all(term.name in INSTANT for term in terms):
        return sum_of(terms, here, at_once=sys.maxsize)
    return sum_of(terms, _RemoteCalls(config, terms), at_once=config.processes * config.concurrency)


def sum_of(terms: Sequence[Term], calls: "RewardCalls | _RemoteCalls", at_once: int) -> Judge:
    """Return the function that adds up the terms. Each term with a `batch_size` has its own batches."""
    sources = [calls.one] if any(term.batch_size is None for term in terms) else []
    sources += [_batched(term.label, term.batch_size, calls, at_once) for term in terms if term.batch_size is not None]

    async def judge(response: str, problem: Problem) -> RewardOutcome:
        # Keep the order of the terms.
        parts, late = dict.fromkeys((term.label for term in terms), 0.0), None
        for found in await asyncio.gather(*(source(response, problem) for source in sources)):
            if isinstance(found, LateReward):
                parts, late = dict.fromkeys(parts, 0.0), found
                break
            if isinstance(found, RewardError):
                return found
            parts |= found
        total = 0.0
        for term in terms:
            total += term.weight * parts[term.label]
        return RewardResult(total, parts if len(terms) > 1 else {}, late)

    return judge


def _batched(
    label: str, size: int, calls: "RewardCalls | _RemoteCalls", at_once: int
) -> Callable[[str, Problem], Awaitable[Parts]]:
    batches = Batches(lambda responses, problems: calls.batch(label, responses, problems), size, at_once)

    async def judge(response: str, problem: Problem) -> Parts:
        found = await batches(response, problem)
        return found if isinstance(found, RewardError) else {label: found}

    return judge


class _RemoteCalls:
    """`RewardCalls` in at most `reward.processes` processes, with the time limit `reward.timeout_s` per call."""

    def __init__(self, config: "RewardConfig", terms: Sequence[Term]):
        path = f"{RewardCalls.__module__}.{RewardCalls.__qualname__}"
        self._wrong_if_late = all(term.name in WRONG_IF_LATE for term in terms)
        target = PoolTarget(
            path, {"terms": terms}, "the reward's process", "reward.timeout_s", f"reward.name = {config.name}"
        )
        self._pool = CallPool(target, config.processes, config.concurrency, config.timeout_s)

    async def one(self, response: str, problem: Problem) -> Parts:
        """See `RewardCalls.one`. Raises DataError: the processes do not start."""
        try:
            return await self._pool.call("one", response, problem)
        except CallError as error:
            is_wrong = isinstance(error, CallTimeout) and self._wrong_if_late
            return (LateReward if is_wrong else RewardError)(str(error), error.details)

    async def batch(
        self, label: str, responses: Sequence[str], problems: Sequence[Problem]
    ) -> Sequence[float | RewardError]:
        """See `RewardCalls.batch`. Raises DataError: the processes do not start."""
        try:
            return await self._pool.call("batch", label, responses, problems)
        except CallError as error:
            return [RewardError(str(error), error.details)] * len(responses)


def try_reward(judge: Judge, problem: Problem) -> None:
    """Score the problem's own answer before the run starts. Errors that this response may have caused are printed as a
    note.

    Raises:
        ConfigError: the function's code is wrong, it does not return a reward, or its server, model or file is missing.
    """

    async def trial() -> RewardOutcome:
        return await judge(problem.answer or "", problem)

    verdict = asyncio.run(trial())
    said = verdict.late if isinstance(verdict, RewardResult) else verdict
    if isinstance(said, UnavailableReward):
        fix = f"start the server, or correct {said.section}.kwargs; no sample would get a reward"
        raise ConfigError([Violation(f"{said.section}.name", None, str(said), fix)])
    if isinstance(said, FaultyReward):
        fix = "correct the reward's code: this error does not depend on the response"
        raise ConfigError([Violation(f"{said.section}.name", None, str(said), fix)])
    if isinstance(said, WrongReward):
        fix = "return one number for one response; with batch_size, a list with one number for each response"
        sample = f"on the response {problem.answer!r} to {problem.messages[-1]['content']!r:.80}"
        raise ConfigError([Violation(f"{said.section}.name", None, f"{said} ({sample})", fix)])
    if isinstance(said, RewardError):
        told = " ".join(str(said).split())
        sys.stderr.write(f"note: a trial call of the reward failed: {told}; samples without a reward are left out\n")
