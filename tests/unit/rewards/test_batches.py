"""Rewards that judge many responses in a call."""

import asyncio
import time

import numpy as np
import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rewards.judge import Batches, RewardResult, make_judge, try_reward
from nemo_rl_lite.rewards.registry import RewardError, UnavailableReward, WrongReward, find_batch_reward, find_reward
from tests.unit.rewards.test_judge import config

HERE = "tests.unit.rewards.test_batches"


def problem(answer: str, **metadata) -> Problem:
    return Problem(chat("?"), answer, metadata)


def equal(responses, answers, scale=1.0):
    """A batch that has `raise` in it fails."""
    if "raise" in responses:
        raise ValueError("no")
    if "sleep" in responses:
        time.sleep(600)
    return [scale * (response == answer) for response, answer in zip(responses, answers, strict=True)]


async def later(responses, answers, problems):
    await asyncio.sleep(0.01)
    return np.array([len(responses), *(one.metadata["bonus"] for one in problems[1:])])


def some(responses, answers):
    return [None if response == "none" else 1 for response in responses]


def wrong(responses, answers):
    return {"short": [1.0], "text": ["1.0"] * len(responses), "one": 1.0}[responses[0]]


class Model:
    made = 0

    def __init__(self, factor):
        Model.made += 1
        self.factor = factor

    def __call__(self, responses, answers):
        return [self.factor * len(response) for response in responses]


class Single(Model):
    def __call__(self, response, answer, problem):
        return self.factor * len(response) + len(problem.metadata)


class Mute:
    """It cannot be called."""


class Broken:
    def __init__(self):
        raise OSError("no weights here")

    def __call__(self, response, answer):
        return 1.0


def judged(judge, *responses, answer="1"):
    async def all_of_them():
        return await asyncio.gather(*(judge(response, problem(answer)) for response in responses))

    return asyncio.run(all_of_them())


def batched(name, *responses, **kwargs):
    return asyncio.run(find_batch_reward(f"{HERE}.{name}", kwargs)(responses, [problem("1", bonus=7)] * len(responses)))


def test_a_function_gets_lists_and_returns_one():
    assert batched("equal", "1", "2", scale=2.0) == [2.0, 0.0]
    assert batched("later", "a", "b", "c") == [3.0, 7.0, 7.0]
    first, second = batched("some", "none", "x")
    assert str(first) == f"{HERE}.some returned None" and second == 1.0


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("short", "wrong returned 1 rewards for 2 responses"),
        ("text", "wrong returned '1.0', a str; a reward is one number"),
        ("one", "wrong returned a float for a list of responses"),
    ],
)
def test_what_is_no_list_of_rewards_names_the_function(first, told):
    with pytest.raises(WrongReward, match=told):
        batched("wrong", first, "b")


def test_a_class_is_made_once_and_called():
    Model.made = 0
    assert batched("Model", "ab", factor=2.0) == [4.0]
    reward = find_reward(f"{HERE}.Single", {"factor": 1.0})
    assert [reward("abc", problem("", column=1)) for _ in range(2)] == [4.0, 4.0]
    assert Model.made == 2
    for kwargs in ({}, {"factor": 1.0, "size": 2}):
        with pytest.raises(ConfigError, match=r"(?s)reward\.kwargs.*do not fit.*factor|size"):
            find_reward(f"{HERE}.Single", kwargs)
    with pytest.raises(ConfigError, match="is not a function"):
        find_reward(f"{HERE}.Mute", {})


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_a_class_that_cannot_be_made_ends_a_run_before_it_starts(timeout_s):
    judge = make_judge(config(f"{HERE}.Broken", timeout_s))
    (verdict,) = judged(judge, "1")
    assert isinstance(verdict, UnavailableReward)
    with pytest.raises(ConfigError, match=r"(?s)reward\.name.*Broken cannot be instantiated: OSError: no weights here"):
        try_reward(judge, problem("1"))


class Recorder:
    """Judges batches; each takes until the event loop has nothing else to do."""

    def __init__(self):
        self.sizes, self.now, self.most = [], 0, 0

    async def __call__(self, responses, problems):
        self.sizes.append(len(responses))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.05)
        self.now -= 1
        return [float(response) for response in responses]


@pytest.mark.parametrize(("at_once", "sizes"), [(1, [4, 4, 2]), (100, [4, 4, 2])])
def test_those_that_wait_are_judged_together(at_once, sizes):
    recorder = Recorder()
    batches = Batches(recorder, 4, at_once)
    responses = [str(number) for number in range(10)]
    # Each rollout has its own event loop.
    for _ in range(2):
        assert judged(batches, *responses) == [float(one) for one in responses]
        assert recorder.sizes == sizes and recorder.most <= at_once
        recorder.sizes.clear()
    assert judged(batches, "7") == [7.0], "a lone response does not wait for others"


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_an_error_of_a_batch_is_an_error_of_its_samples(timeout_s):
    judge = make_judge(config(f"{HERE}.equal", timeout_s, batch_size=2, processes=1))
    assert judged(judge, "1", "2", "1") == [RewardResult(1.0), RewardResult(0.0), RewardResult(1.0)]
    verdicts = judged(judge, "1", "raise", "1", "1")
    assert all("ValueError: no" in str(one) for one in verdicts[:2]) and verdicts[2:] == [RewardResult(1.0)] * 2


def test_the_time_limit_is_for_a_batch():
    judge = make_judge(config(f"{HERE}.equal", 1.5, batch_size=2, processes=2))
    assert judged(judge, "1") == [RewardResult(1.0)]
    verdicts = judged(judge, "1", "sleep", "1", "1")
    late = "no answer within reward.timeout_s = 1.5"
    assert [str(one) for one in verdicts[:2]] == [late] * 2 and verdicts[2:] == [RewardResult(1.0)] * 2
    assert all(isinstance(one, RewardError) for one in verdicts[:2])


def test_terms_are_batched_each_by_itself():
    terms = {
        "long": {"name": f"{HERE}.Model", "weight": 0.1, "kwargs": {"factor": 1.0}, "batch_size": 8},
        "also": {"name": f"{HERE}.equal", "weight": 2.0, "batch_size": 2},
    }
    judge = make_judge(config("exact_match", None, **terms))
    assert judged(judge, "1", "22") == [
        RewardResult(1 + 0.1 + 2.0, {"exact_match": 1.0, "long": 1.0, "also": 1.0}),
        RewardResult(pytest.approx(0.2), {"exact_match": 0.0, "long": 2.0, "also": 0.0}),
    ]
