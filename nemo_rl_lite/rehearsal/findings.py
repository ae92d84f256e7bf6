"""Findings of a rehearsal: faults of the user's code that hurt a run, each with a fix."""

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.rehearsal.script import AFTER_KILL, CALLED, KILLED, OTHERS, PLAIN, SAME, SLOW, TWICE, UNANSWERED
from nemo_rl_lite.rehearsal.stage import AT_ONCE, Played, Rehearsal

# In the error of a request that is too long, which is no fault.
_FULL = "policy.max_total_sequence_length"
# A refused request is repeated this often.
_REPEATS = 3
# Seconds of user code in an episode.
_SLOW_S = 2.0


@dataclass(frozen=True)
class Finding:
    """A fault, where it showed, and what to do. A `note` does not hurt every run."""

    what: str
    where: str
    fix: str
    level: Literal["fault", "note"] = "fault"


def findings(found: Rehearsal) -> list[Finding]:
    """Return the faults of a rehearsal, then its notes."""
    checks: Sequence[Callable[[Rehearsal], Iterator[Finding]]] = (
        *(_failures, _refusals, _rewards, _leaked_answers, _shared_state, _other_requests, _changed_histories),
        *(_unanswered_calls, _blocked_loop, _left_behind, _no_response, _after_kill),
        *(_no_room, _endless, _slow_code),
    )
    every = [one for check in checks for one in check(found)]
    return sorted(every, key=lambda one: one.level)


def _failures(found: Rehearsal) -> Iterator[Finding]:
    """Yield failures of agent, environment and reward. Those of all scripts are one fault."""
    by_text = defaultdict[str, list[Played]](list)
    for one in found.episodes:
        if one.failure is not None and one.script not in (KILLED, AFTER_KILL):
            by_text[_kind_of(one.failure.text)].append(one)
    for own in by_text.values():
        kind, text = own[0].failure.kind, own[0].failure.text  # pyrefly: ignore
        who = "reward" if kind == "reward" else "agent" if found.config.agent.name else "environment"
        scripts = {one.script.name for one in own}
        if "no answer within" in text:
            fix = "bound its turns and its waits, or give it more time: --seconds"
            responses = max(one.turns for one in own)
            what = f"the {who} does not end: {text}" + (f", after {responses} responses" if responses else "")
        elif scripts == {one.script.name for one in found.episodes}:
            what, fix = f"the {who} always fails: {text}", "correct it: this does not depend on the response"
        else:
            what, fix = f"the {who} fails: {text}", "let it take any response: a failed episode is not trained on"
        yield Finding(what, _names(own), fix)


def _refusals(found: Rehearsal) -> Iterator[Finding]:
    by_kind, repeated = dict[str, tuple[str, list[Played]]](), []
    for one in found.episodes:
        counts = Counter(map(_kind_of, one.episode.refused))
        for text in dict.fromkeys(one.episode.refused):
            if _FULL not in text:
                by_kind.setdefault(_kind_of(text), (text, []))[1].append(one)
        if max(counts.values(), default=0) >= _REPEATS:
            repeated.append(one)
    for text, own in by_kind.values():
        yield Finding(f"a request is refused: {text}", _names(own), "change the request")
    if repeated:
        text = repeated[0].episode.refused[-1]
        what = f"a refused request is sent again and again: {text}"
        yield Finding(what, _names(repeated), "do not repeat requests with status 400")


def _rewards(found: Rehearsal) -> Iterator[Finding]:
    """Yield a finding if wrong answers have the rewards of right ones, or higher ones."""
    right, wrong = (found.of(script) for script in PLAIN)
    high, low = ([one.episode.reward for one in own if one.episode.reward is not None] for own in (right, wrong))
    where = _names([*right, *wrong])
    if {*high, *low} == {0.0}:
        fix = "nothing to do if the answer of a problem is not its response"
        yield Finding("right and wrong answers have the reward 0", where, fix, "note")
    elif len({*high, *low}) == 1:
        fix = "let the reward depend on the responses: equal rewards train nothing"
        yield Finding(f"right and wrong answers have the reward {high[0] if high else low[0]:g}", where, fix)
    elif high and low and max(high) < min(low) and all(one.episode.problem.answer for one in right):
        what = f"right answers have lower rewards than wrong ones: {max(high):g} and {min(low):g}"
        yield Finding(what, where, "check the sign of the reward: a run trains wrong answers")
    elif high and low and high[0] not in low and (same := found.of(SAME)) and same[0].episode.reward == high[0]:
        what = f"a wrong answer has the reward {high[0]:g} of an earlier, right answer to the same problem"
        yield Finding(what, SAME.name, "keep no rewards or files by problem: a run has several episodes of each")


def _leaked_answers(found: Rehearsal) -> Iterator[Finding]:
    """Yield a finding if the agent adds the problem's answer to its prompt."""
    leaks = [one for one in found.of(*PLAIN) if one.turns]
    answers = [one.episode.problem.answer for one in leaks]
    if leaks and all(
        len(answer) > 2
        and not _has(one.episode.problem.messages, answer)
        and _has([message for message in one.episode.prompt if message["role"] != "assistant"], answer)
        for one, answer in zip(leaks, answers, strict=True)
    ):
        what = f"the first request has the answer of the problem ({answers[0][:40]!r})"
        yield Finding(what, _names(leaks), "leave it out, unless the policy has to repeat it")


def _has(messages: Iterable[Message], text: str) -> bool:
    return any(text in message["content"] for message in messages)


def _shared_state(found: Rehearsal) -> Iterator[Finding]:
    """Yield a finding if an episode's messages have a wrong answer of another one."""
    twins = found.of(TWICE)
    for one in found.episodes:
        others = [other for other in found.episodes if other is not one and not (one in twins and other in twins)]
        foreign = {text for other in others for text in other.wrong} - set(one.wrong)
        said = " ".join(message["content"] for history in one.histories() for message in history)
        if shared := next((word for word in re.findall(r"\d{6,}", said) if word in foreign), None):
            what = f"an episode's messages have a response of another episode ({shared})"
            yield Finding(what, one.script.name, "keep no state between episodes, such as a list of the module")
            return


def _other_requests(found: Rehearsal) -> Iterator[Finding]:
    """Yield a finding if equal responses lead to different messages or rewards."""
    twins = found.of(TWICE)
    if not twins or any(one.failure for one in twins):
        return
    rewards = {f"{one.episode.reward:g}" for one in twins if one.episode.reward is not None}
    if len(rewards) > 1:
        what = f"equal responses have the rewards {' and '.join(sorted(rewards))}"
        yield Finding(what, TWICE.name, "let it depend on problem and responses only", "note")
    first, second = (one.histories() for one in twins)
    if first == second:
        return
    pairs = (
        (one, other) for own, its in zip(first, second, strict=False) for one, other in zip(own, its, strict=False)
    )
    different = next((f": {_brief(one)} and {_brief(other)}" for one, other in pairs if one != other), "")
    fix = "derive random choices from the problem, and leave out times and random names"
    yield Finding(f"equal responses lead to different messages{different}", TWICE.name, fix, "note")


def _changed_histories(found: Rehearsal) -> Iterator[Finding]:
    """Yield a finding if each response begins a row, although the requests repeat the conversation. It is a note if the
    agent repeats it in other episodes: some harnesses drop responses that they cannot use."""
    long = [one for one in found.episodes if one.turns >= 3]
    if not (changed := [one for one in long if _changes(one.histories(), one.turns)]):
        return
    before, after = changed[0].histories()[:2]
    place = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
    what = f"each response begins a training row, because message {place + 1} changes: "
    what += f"{_brief(before[place])} becomes {_brief(after[place])}"
    fix = "send the messages back as they were, and append to them; otherwise a row has one response"
    yield Finding(what, _names(changed), fix, "fault" if len(changed) == len(long) else "note")


def _changes(histories: Sequence[Sequence[Message]], turns: int) -> bool:
    """Return whether each turn has its own row, which repeats the one before with changes."""
    return len(histories) >= turns and all(_repeats(*pair) for pair in pairwise(histories))


def _repeats(before: Sequence[Message], after: Sequence[Message]) -> bool:
    """Return whether messages are those before with changes, and not another conversation."""
    said = {message["content"] for message in before if message["content"]}
    return len(after) >= len(before) and sum(message["content"] in said for message in after) * 2 >= len(before)


def _unanswered_calls(found: Rehearsal) -> Iterator[Finding]:
    """Yield a finding if a message follows a tool call, but not its result."""
    for one in found.episodes:
        for history in one.histories():
            for message, following in pairwise(history):
                if not (calls := message.get("tool_calls")):
                    continue
                what = ""
                if following["role"] != "tool":
                    name = calls[0]["function"]["name"]
                    what = f"a call of {name} has no result: the next message is of the {following['role']}"
                elif following.get("tool_call_id") not in (None, *(call["id"] for call in calls)):
                    what = f"a result has the tool_call_id {following['tool_call_id']!r:.40} of no call"
                if what:
                    fix = "answer each call with a message of the role `tool` and the call's id"
                    yield Finding(what, one.script.name, fix)
                    return


def _blocked_loop(found: Rehearsal) -> Iterator[Finding]:
    name, slow = found.config.agent.name, found.of(SLOW)
    if name is None or not inspect.iscoroutinefunction(imported(name)) or any(one.failure for one in slow):
        return
    # Then episodes wait for one another in any case.
    if found.config.agent.concurrency < AT_ONCE:
        return
    waits = sorted((span.begin, span.end) for one in slow for span in one.episode.spans if span.what == "generate")
    if waits and all(end is not None and end <= begin for (_, end), (begin, _) in pairwise(waits)):
        what = f"of {len(slow)} episodes at once, only one waits for a response at a time"
        fix = "await in an `async def` agent: a blocking client stops all episodes of the process"
        yield Finding(what, "slow responses", fix)


def _left_behind(found: Rehearsal) -> Iterator[Finding]:
    for kind, left in (("processes", found.left_processes), ("temporary files", found.left_files)):
        if len(left) >= AT_ONCE:
            what = f"{len(left)} {kind} are left behind, such as {left[0]}"
            yield Finding(what, "all episodes", "end or remove them in a `finally` block")


def _no_response(found: Rehearsal) -> Iterator[Finding]:
    """Yield what an agent does wrong whose episode ends while it waits for a response."""
    if found.late_s is not None:
        what = f"the agent still runs {found.late_s:g} s after its episode ended without a response"
        fix = "let the error of its request end it: until then it keeps the agent's process from new episodes"
        yield Finding(what, UNANSWERED.name, fix)
    left, usual = found.left_unanswered, (*found.left_processes, *found.left_files)
    if left and len(usual) < AT_ONCE:
        what = f"an agent whose request fails leaves behind {left[0]}"
        yield Finding(what, UNANSWERED.name, "end processes and remove files in a `finally` block")


def _after_kill(found: Rehearsal) -> Iterator[Finding]:
    before = any(one.failure for one in found.of(PLAIN[0]))
    for one in found.of(AFTER_KILL):
        if one.failure is not None and not before:
            what = f"episodes fail after a process of user code was killed: {one.failure.text}"
            yield Finding(what, one.script.name, "let a new process take over what it left, such as a lock file")


def _no_room(found: Rehearsal) -> Iterator[Finding]:
    """Yield a finding if all episodes of plain responses, or those of a call and an answer, end without room."""
    for scripts, what in ((PLAIN, "messages leave"), ((CALLED,), "a call and its result leave")):
        played = found.of(*scripts)
        if played and all(one.episode.ending == "length" and not one.failure for one in played):
            most = found.config.policy.max_total_sequence_length
            what += f" no room for the next response within policy.max_total_sequence_length = {most}"
            yield Finding(what, _names(played), "raise it, or shorten the messages")
            return


def _endless(found: Rehearsal) -> Iterator[Finding]:
    if found.config.environment.name is None:
        return
    ended = [one for one in found.of(PLAIN[0]) if not one.failure]
    if ended and all(one.episode.ending == "turns" for one in ended):
        what = "no episode ends before environment.max_turns, not even after the right answer"
        yield Finding(what, _names(ended), "return done=True at the end", "note")


def _slow_code(found: Rehearsal) -> Iterator[Finding]:
    ended = [one for one in found.of(*PLAIN, *OTHERS) if not one.failure]
    own = sorted(one.episode.seconds("environment") + one.episode.seconds("reward") for one in ended)
    if own and own[len(own) // 2] > _SLOW_S:
        what = f"user code takes {own[len(own) // 2]:.1f} s of an episode (median)"
        yield Finding(
            what, "all episodes", "engines wait for it: see agent.concurrency and environment.concurrency", "note"
        )


def _names(episodes: Sequence[Played]) -> str:
    return ", ".join(dict.fromkeys(one.script.name for one in episodes))


def _kind_of(text: str) -> str:
    """Return an error's text without the values that differ between episodes."""
    return re.sub(r"'[^']*'|\d+", "#", text)


def _brief(message: Message) -> str:
    text = f"{message['role']} {message['content']!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."
