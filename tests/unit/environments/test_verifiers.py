"""An environment of verifiers plays and judges an episode in its own loop.

Where the package is not installed, `fake_verifiers` has the part of verifiers 0.2.1 that the adapter uses.
"""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments import verifiers as adapter
from nemo_rl_lite.environments.registry import check_environment
from nemo_rl_lite.environments.tools import EpisodeError
from nemo_rl_lite.environments.verifiers import Verifiers, write_rows
from tests.unit.environments.test_environments import config, turn

GAMES = "tests.unit.environments.verifiers_games"
PROBLEM = Problem(({"role": "user", "content": "2+3?"},), "5", {"answer": "5", "example_id": 0})


@pytest.fixture(autouse=True, scope="module")
def package():
    """The package, installed or fake."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("verifiers") is None:
            patch.syspath_prepend(Path(__file__).with_name("fake_verifiers"))
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "verifiers" or name == GAMES]:
        del sys.modules[name]
    adapter._loaded.cache_clear()
    adapter._client_class.cache_clear()


def play(arguments, *turns, is_cut=False):
    """The observations of an episode, and the reward where it is cut short."""

    async def episode():
        made, said, observations = Verifiers(GAMES, arguments), list(PROBLEM.messages), []
        try:
            for turn in turns:
                said.append(turn if isinstance(turn, dict) else {"role": "assistant", "content": turn})
                observations.append(await made.step(PROBLEM, said))
                said += observations[-1].messages
            return observations, await made.cut_short(PROBLEM, said) if is_cut else None
        finally:
            await made.close()

    return asyncio.run(episode())


def test_a_game_goes_on_until_it_is_over_and_gives_the_reward():
    (first, last), _ = play({}, "4", "5")
    assert first.messages == ({"role": "user", "content": "not 4"},) and not first.done
    assert last.done and last.reward == 1.0


def test_a_tool_is_offered_called_and_answered():
    (tool,) = check_environment(config("verifiers", environment=GAMES, arguments={"kind": "tool"}))
    assert tool["function"]["name"] == "add" and set(tool["function"]["parameters"]["properties"]) == {"a", "b"}

    (both, wrong, last), _ = play(
        {"kind": "tool"},
        turn("", ("add", {"a": 2, "b": 3}), ("add", {"a": 1, "b": 1})),
        turn("", ("ad", "there is no tool 'ad'")),
        "5",
    )
    assert [message["content"] for message in both.messages] == ["5", "2"]
    assert both.messages[0]["role"] == "tool" and both.messages[0]["tool_call_id"] == "call0"
    assert wrong.messages[0]["content"] == "error: there is no tool 'ad'"
    assert last.done and last.reward == 1.0


def test_an_episode_that_is_cut_short_is_judged():
    observations, reward = play({}, "4", is_cut=True)
    assert len(observations) == 1 and reward == 0.25


def test_an_environment_that_fails_is_an_error_of_the_episode():
    with pytest.raises(EpisodeError, match="the board is broken"):
        play({}, "break")


def test_its_rows_are_written_for_the_launcher(tmp_path):
    write_rows(GAMES, str(tmp_path / "rows.jsonl"))
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row["prompt"] == [{"role": "user", "content": "2+3?"}] and row["answer"] == "5"
