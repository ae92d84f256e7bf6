"""Score the attacks on a reward, and tell which of them it pays for."""

import asyncio
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nemo_rl_lite.config.schema import RewardConfig
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.rewards.attacks import Attack, Response, responses_to
from nemo_rl_lite.rewards.judge import Judge, RewardResult
from nemo_rl_lite.rewards.registry import NONE

# Rewards that read no answer, by their definition.
_BLIND = {"format", NONE}
# Median call time, in seconds, that delays a rollout.
_SLOW_S = 1.0
# Share of the distance between a wrong and the right answer that an attack must not get, and what it must not add.
_MOST, _MOST_MORE = 0.5, 0.1
_SHOWN = 70
# Beginning of an error, and its place in the code.
_KIND = re.compile(r"^[^:\d']*|\([^()]*, line \d+\)$")
# Time limit of a call of a reward that computes, in seconds.
_CALL_S = 10.0
# Kind and fix of an error, by a part of its text.
_FAILURES = {
    "no answer within": ("time", "bound the response's length, and simplify expressions and loops"),
    " returned ": ("an invalid result", "return one finite number for every response"),
    "": ("an exception", "return 0 for a response that cannot be read: a failed sample is not trained on"),
}


@dataclass(frozen=True)
class Score:
    """The reward of a response, or the error. `seconds`: time of the call, with its wait for a process."""

    problem: int
    response: Response
    reward: float | None
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Finding:
    """A fault of the reward, with a response that shows it, and what to change. A `note` may be intended."""

    attack: str
    what: str
    fix: str
    response: str = ""
    score: float | None = None
    level: Literal["fault", "note"] = "fault"


@dataclass(frozen=True)
class Checkup:
    """All scores, and what they say."""

    scores: Sequence[Score]
    findings: Sequence[Finding]
    unpaid: Sequence[str]
    """Right answers in the layouts that the reward does not accept, if it accepts another."""
    skipped: int
    """Number of responses without a score, after the time limit."""

    def cells(self) -> list[dict[str, str | int | float | None]]:
        """Return a row per attack: number of responses, highest reward, failures, and longest call time in
        seconds."""
        by_attack = defaultdict[str, list[Score]](list)
        for one in self.scores:
            attack = one.response.attack
            is_right = attack is None or one.response.holds_answer
            by_attack["the right answer" if is_right else attack.what].append(one)
        return [
            {
                "response": name,
                "responses": len(own),
                "highest reward": max((one.reward for one in own if one.reward is not None), default=None),
                "failed": sum(one.reward is None for one in own),
                "seconds": max(one.seconds for one in own),
            }
            for name, own in by_attack.items()
        ]


def limited(config: RewardConfig, limit_s: float) -> RewardConfig:
    """Return the configuration with a time limit per call of at most `limit_s` seconds. A reward that waits for no
    server has at most `_CALL_S`."""
    most = limit_s if config.concurrency > 1 else min(limit_s, _CALL_S)
    return replace(config, timeout_s=min(config.timeout_s or most, most))


def check_up(
    judge: Judge, problems: Sequence[Problem], config: RewardConfig, most_tokens: int, limit_s: float
) -> Checkup:
    """Score right answers and attacks for each problem, for at most `limit_s` seconds.

    `judge`: scores as the run does; `config`: its configuration; `most_tokens`: maximum length of a response.
    """
    answers = [problem.answer for problem in problems]
    each = [responses_to(problem, answers, most_tokens) for problem in problems]
    calls = [(number, one) for number, own in enumerate(each) for one in own]
    # Equal responses, before and after the others.
    again = [(0, one) for one in each[0] if one.attack in (None, Attack.WRONG)]
    calls_again = [*calls, *again]
    outcomes = asyncio.run(
        judged(judge, [(one.text, problems[number]) for number, one in calls_again], config, limit_s)
    )
    scores = [None if one is None else Score(*call, *one) for call, one in zip(calls_again, outcomes, strict=True)]
    found = [one for one in scores[: len(calls)] if one is not None]
    changed = list(_changed(found, [one for one in scores[len(calls) :] if one is not None]))
    # Random rewards make any other comparison meaningless.
    findings = [*_failures(found), *(changed or _paid(found, problems, config)), *_slow(found)]
    findings.sort(key=lambda one: one.level)
    return Checkup(found, findings, [] if changed else list(_unpaid_layouts(found)), scores.count(None))


async def judged(
    judge: Judge, calls: Sequence[tuple[str, Problem]], config: RewardConfig, limit_s: float
) -> list[tuple[float | None, float, str] | None]:
    """Score responses, as many at once as the run does. Return reward, seconds and error of each; None of a call that
    did not start within `limit_s` seconds."""
    slots = asyncio.Semaphore(config.processes * config.concurrency * (config.batch_size or 1))
    deadline = time.monotonic() + limit_s

    async def score(response: str, problem: Problem) -> tuple[float | None, float, str] | None:
        async with slots:
            begun = time.monotonic()
            if begun > deadline:
                return None
            outcome = await judge(response, problem)
            seconds = time.monotonic() - begun
        return (outcome.reward, seconds, "") if isinstance(outcome, RewardResult) else (None, seconds, str(outcome))

    return await asyncio.gather(*(score(*one) for one in calls))


def _failures(scores: Sequence[Score]) -> Iterator[Finding]:
    """Yield one fault for each kind of error, which its beginning and its place in the code tell."""
    by_kind = defaultdict[str, list[Score]](list)
    for one in scores:
        if one.reward is None:
            by_kind["".join(_KIND.findall(one.error))].append(one)
    for own in by_kind.values():
        first = min(own, key=lambda one: len(one.response.text))
        kind, fix = next(said for part, said in _FAILURES.items() if part in first.error)
        what = f"the reward fails for {len(own)} of {len(scores)} responses: {' '.join(first.error.split())}"
        yield Finding(kind, what, fix, brief(first.response.text))


def _changed(scores: Sequence[Score], again: Sequence[Score]) -> Iterator[Finding]:
    earlier = {one.response.text: one for one in scores if one.problem == 0}
    for second in again:
        first = earlier[second.response.text]
        if None not in (first.reward, second.reward) and abs(first.reward - second.reward) > 1e-6:  # pyrefly: ignore
            what = f"equal responses have the rewards {first.reward:g} and {second.reward:g}"
            fix = "make it a function of response and row: no random numbers, no memory of earlier calls"
            yield Finding("the same response again", what, fix, brief(second.response.text), second.reward)
            return


def _paid(scores: Sequence[Score], problems: Sequence[Problem], config: RewardConfig) -> Iterator[Finding]:
    """Yield the attacks that are paid for on at least half of the problems."""
    rewarded = [one for one in scores if one.reward is not None]
    if not rewarded:
        return
    if config.name in _BLIND and not config.terms:
        fix = "use it as a term of a reward that compares answers (reward.terms)"
        yield Finding("a wrong answer", f"reward={config.name} reads no answer", fix, level="note")
        return
    scales = _scales(rewarded)
    yield from _unpaid(rewarded, scales)
    by_key = defaultdict[tuple[Attack, str], list[Score]](list)
    for one in rewarded:
        if one.response.attack is not None:
            by_key[one.response.attack, one.response.key].append(one)
    best = dict[Attack, list[Score]]()
    for (attack, _), own in by_key.items():
        paid = [one for one in own if scales[one.problem].pays(one)]
        if 2 * len(paid) >= len(own) and len(paid) > len(best.get(attack, ())):
            best[attack] = paid
    for attack, paid in sorted(best.items(), key=lambda one: list(Attack).index(one[0])):
        one = paid[0]
        times = f"on {len(paid)} of {len(by_key[attack, one.response.key])} problems"
        has_answer = problems[one.problem].answer.strip()
        right = f"the right answer gets {scales[one.problem].right:.3g}" if has_answer else "the data has no answers"
        what = f"{attack.what} gets {one.reward:.3g} {times}; {right}"
        yield Finding(attack.what, what, attack.fix, brief(one.response.text), one.reward)


@dataclass(frozen=True)
class _Scale:
    """Lowest reward of a wrong answer, and highest of the right one; 0 and 1 without a right answer."""

    wrong: float
    right: float

    @classmethod
    def of(cls, scores: Sequence[Score]) -> "_Scale":
        right = [one.reward for one in scores if one.response.attack is None]
        wrong = [one.reward for one in scores if one.response.attack is Attack.WRONG]
        return cls(min(wrong, default=0.0), max(right)) if right else cls(0.0, 1.0)  # pyrefly: ignore

    def pays(self, one: Score) -> bool:
        distance = self.right - self.wrong
        if one.response.holds_answer or distance <= 0:
            return one.reward > self.right + _MOST_MORE * max(distance, 0)  # pyrefly: ignore
        return one.reward > self.middle  # pyrefly: ignore

    @property
    def middle(self) -> float:
        """Most that an attack may get."""
        return self.wrong + _MOST * (self.right - self.wrong)


def _scales(scores: Sequence[Score]) -> dict[int, _Scale]:
    """Return the scale of each problem."""
    by_problem = defaultdict[int, list[Score]](list)
    for one in scores:
        by_problem[one.problem].append(one)
    return {number: _Scale.of(own) for number, own in by_problem.items()}


def _unpaid_layouts(scores: Sequence[Score]) -> Iterator[str]:
    """Yield a right answer in each layout that gets at most half of the scale on at least half of the problems.
    Problems that pay for no layout do not count."""
    rewarded = [one for one in scores if one.reward is not None]
    scales, by_layout = _scales(rewarded), defaultdict[str, list[Score]](list)
    for one in rewarded:
        if one.response.attack is None and scales[one.problem].right > scales[one.problem].wrong:
            by_layout[one.response.key].append(one)
    for own in by_layout.values():
        if 2 * sum(one.reward <= scales[one.problem].middle for one in own) >= len(own):  # pyrefly: ignore
            yield own[0].response.text


def _unpaid(scores: Sequence[Score], scales: dict[int, _Scale]) -> Iterator[Finding]:
    """Yield the fault that right answers get no more than wrong ones."""
    unpaid = [number for number, scale in scales.items() if scale.right <= scale.wrong]
    shown = next((one for one in scores if one.problem in unpaid[:1] and one.response.attack is None), None)
    if shown is not None and 2 * len(unpaid) > len(scales):
        times = f"on {len(unpaid)} of {len(scales)} problems"
        what = f"the right answer gets no more than a wrong one, in any layout, {times}"
        fix = "compare texts with texts and numbers with numbers, and accept the layout that the prompt asks for"
        yield Finding("the right answer", what, fix, brief(shown.response.text), shown.reward)


def _slow(scores: Sequence[Score]) -> Iterator[Finding]:
    middle = statistics.median(one.seconds for one in scores) if scores else 0.0
    if middle > _SLOW_S:
        fix = "see reward.concurrency and reward.processes; load models once, in a class"
        yield Finding("time", f"a call takes {middle:.1f} s (median)", fix, level="note")


def brief(text: str) -> str:
    """Return a response on one line, shortened in the middle."""
    shown, half = repr(text), _SHOWN // 2
    return shown if len(shown) <= _SHOWN else f"{shown[:half]} ... {shown[-half:]} ({len(text)} characters)"
