"""Only work that finishes keeps a rollout alive; what does not is named after `cluster.phase_timeout_s`."""

import asyncio

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.observability import liveness
from nemo_rl_lite.observability.liveness import limited, watched
from nemo_rl_lite.rollout import collector
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutTask
from nemo_rl_lite.rollout.play import SingleTurn
from tests.unit.rollout.script import Script, collected_by, completion, judged_by
from tests.unit.rollout.test_turns import SAMPLING

LIMIT_S = 1.2


class Play(SingleTurn):
    """Waits several times for an environment."""

    def __init__(self, *seconds: float):
        self._seconds = seconds

    async def play(self, episode, assistant):
        await super().play(episode, assistant)
        for seconds in self._seconds:
            with episode.waiting("environment"):
                await asyncio.sleep(seconds)


def collect(play, reward=lambda *_: 1.0, script=None):
    def stop(error: WorkerError) -> None:
        raise AssertionError("the main thread reacts")

    made = collected_by(script or Script(["43"]), judged_by(reward), 200, ErrorShares(0, 0), play)
    task = RolloutTask([Problem(chat("?"), "43")].__getitem__, 1, 1, SAMPLING, 5)
    with watched(stop), limited("the launcher's own work", LIMIT_S):
        return made.collect(task)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(collector, "_LOOK_S", 0.05)
    monkeypatch.setattr(liveness, "PERIOD_S", 0.05)


async def never(*_):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("play", "reward", "waits"), [(Play(60), lambda *_: 1.0, "environment"), (Play(), never, "reward")]
)
def test_what_does_not_answer_ends_the_run_and_is_named(play, reward, waits):
    with pytest.raises(
        WorkerError, match=f"not done within {LIMIT_S} s: 0 of 1 prompts.* 1 wait for the {waits}; it is at"
    ):
        collect(play, reward)


def test_a_rollout_may_take_long_while_something_finishes():
    assert collect(Play(*[LIMIT_S / 2] * 4)).rewards_B.tolist() == [1]


def test_an_engine_has_a_limit_of_its_own():
    class Slow(Script):
        are_in_work = True

        async def sample(self, request, conversation, progress=None):
            await asyncio.sleep(2 * LIMIT_S)
            return completion("43"), 0

    assert collect(Play(), script=Slow()).rewards_B.tolist() == [1]
