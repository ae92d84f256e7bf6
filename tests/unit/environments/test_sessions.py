"""Environments keep an episode's state, answer many episodes at a time, and cost one episode where they fail."""

import asyncio
import os
import time

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.registry import make_environments
from nemo_rl_lite.system.user_errors import CallError
from tests.unit.environments.test_environments import config

HERE = "tests.unit.environments.test_sessions"
PROBLEM = Problem(chat("?"), "")


def says(text: str) -> list[dict]:
    return [*PROBLEM.messages, {"role": "assistant", "content": text}]


class Counter:
    """Counts its own steps, and names its process; can fail in every way."""

    def __init__(self):
        self.steps = 0

    def step(self, problem, conversation):
        self.steps += 1
        match conversation[-1]["content"]:
            case "raise":
                raise ValueError("no")
            case "hang":
                time.sleep(600)
            case "power":
                len(str(7**7**9))
            case "die":
                os._exit(7)
            case "change":
                conversation[0]["content"] = problem.messages[0]["content"] = "changed"
            case "wait":
                time.sleep(0.3)
            case "odd":
                return lambda: None
        return Observation(({"role": "user", "content": f"{self.steps} {os.getpid()}"},))


class AsyncCounter(Counter):
    async def step(self, problem, conversation):
        if conversation[-1]["content"] == "wait":
            await asyncio.sleep(0.3)
            return super().step(problem, says("go"))
        return super().step(problem, conversation)


def answers(environments, *turns: tuple[int, str]) -> list:
    """What each session answers, all of them at a time: a text, or an error."""

    async def play() -> list:
        asked = (environments.step(session, PROBLEM, says(text)) for session, text in turns)
        return await asyncio.gather(*asked, return_exceptions=True)

    return [one if isinstance(one, BaseException) else one.messages[0]["content"] for one in asyncio.run(play())]


@pytest.mark.parametrize("name", [f"{HERE}.Counter", f"{HERE}.AsyncCounter", f"{__file__}:Counter"])
def test_a_session_keeps_its_state_in_one_process_until_it_is_closed(name):
    environments = make_environments(config(name))
    first = answers(environments, *((session, "go") for session in range(6)))
    second = answers(environments, *((session, "go") for session in range(6)))
    assert [one.split()[0] for one in first] == ["1"] * 6 and [one.split()[0] for one in second] == ["2"] * 6
    assert [one.split()[1] for one in first] == [one.split()[1] for one in second]
    asyncio.run(environments.close(0))
    # The session ends behind the call: a step at once may still find it, and one soon after must not.
    assert any(answers(environments, (0, "go"))[0].startswith("1 ") for _ in range(20))


@pytest.mark.parametrize("name", ["Counter", "AsyncCounter"])
def test_many_wait_at_a_time_and_no_more_than_the_limit(name):
    def seconds(concurrency: int) -> float:
        environments = make_environments(config(f"{HERE}.{name}", concurrency=concurrency, processes=1))
        answers(environments, (99, "go"))
        started = time.perf_counter()
        assert len(answers(environments, *((session, "wait") for session in range(8)))) == 8
        return time.perf_counter() - started

    # Eight waits of 0.3 s: all at a time, or two.
    assert seconds(8) < 0.3 * 4 <= seconds(2)


def test_what_fails_costs_its_own_session():
    environments = make_environments(config(f"{HERE}.Counter", timeout_s=1.5, concurrency=8, processes=2))
    turns = ["go", "raise", "hang", "go"]
    started = time.perf_counter()
    first, raised, late, second = answers(environments, *enumerate(turns))
    assert time.perf_counter() - started < 30
    assert first.startswith("1 ") and second.startswith("1 ")
    assert isinstance(raised, CallError) and str(raised) == "ValueError: no"
    assert isinstance(late, CallError) and str(late) == "no answer within environment.timeout_s = 1.5"
    # The others of the late one's process are where they were, and new ones go elsewhere.
    assert [one.split()[0] for one in answers(environments, (0, "go"), (3, "go"), (7, "go"))] == ["2", "2", "1"]
    for session in range(8):
        asyncio.run(environments.close(session))
    (died,) = answers(environments, (8, "die"))
    assert str(died) == "the environment's process ended with status 7"
    # What other episodes had in that process is gone, which is an error and not another beginning.
    environments = make_environments(config(f"{HERE}.Counter", timeout_s=20, processes=1))
    answers(environments, (0, "go"))
    answers(environments, (1, "die"))
    (lost,) = answers(environments, (0, "go"))
    assert str(lost) == "the environment's process has ended, and with it what this session had in it"
    asyncio.run(environments.close(0))
    assert answers(environments, (0, "go"))[0].startswith("1 ")
    environments = make_environments(config(f"{HERE}.Counter", timeout_s=1.5))
    # A step that does not even let other threads run.
    (stuck,) = answers(environments, (9, "power"))
    assert isinstance(stuck, CallError)
    asyncio.run(environments.close(9))
    assert answers(environments, (10, "go"))[0].startswith("1 ")


@pytest.mark.parametrize("name", [f"{HERE}.Counter", "calculator"])
def test_an_environment_cannot_change_the_problem(name):
    environments = make_environments(config(name, **({"role": "user"} if name == "calculator" else {})))
    answers(environments, (0, "change" if name != "calculator" else "<calc>1</calc>"))
    assert PROBLEM.messages[0]["content"] == "?"


class Later(AsyncCounter):
    """Hides that its step is a coroutine, and fails to close."""

    def step(self, problem, conversation):
        return super().step(problem, conversation)

    async def close(self):
        await asyncio.sleep(0)
        raise ValueError("the box is not empty")


def test_a_coroutine_that_only_a_call_shows_and_a_close_that_fails(capfd):
    environments = make_environments(config(f"{HERE}.Later"))
    assert answers(environments, (0, "go"))[0].startswith("1 ")
    asyncio.run(environments.close(0))
    deadline = time.monotonic() + 20
    said = ""
    while "close()" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        time.sleep(0.05)
    assert "close() of the environment failed: ValueError: the box is not empty" in said
