"""NeMo Gym's protocol with a small server: sessions, tools, rewards, and a server that fails, hangs or is gone."""

import asyncio

import pytest

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tools import callable_tools
from nemo_rl_lite.environments.nemo_gym import NeMoGym
from nemo_rl_lite.environments.registry import check_environment, make_environments
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.system.user_errors import CallError
from tests.unit.environments.gym_server import ROW, serving
from tests.unit.environments.test_environments import config, turn

ASKED = ROW["responses_create_params"]
PROBLEM = Problem(tuple(ASKED["input"]), "", ROW, callable_tools(ASKED["tools"], "tools"))


@pytest.fixture
def server():
    with serving() as server:
        yield server


async def play(environment, *turns):
    """The observations of an episode, in which the assistant says these turns."""
    said, observations = list(PROBLEM.messages), []
    for one in turns:
        said.append(one)
        observations.append(await environment.step(PROBLEM, said))
        said += observations[-1].messages
    return observations


def test_an_episode_has_a_session_tools_and_a_reward(server):
    async def both():
        right, wrong = NeMoGym(server.url, 1000), NeMoGym(server.url, 1000)
        turns = [turn("", ("increment", {"count": 4}), ("value", {})), turn("<think>\n3 + 4\n</think>\n\n7")]
        observations = await asyncio.gather(play(right, *turns), play(wrong, turn("7")))
        await asyncio.gather(right.close(), wrong.close())
        return observations

    (first, last), (only,) = asyncio.run(both())
    assert [message["content"] for message in first.messages] == ['{"success": true}', '{"count": 7}']
    assert (last.done, last.reward) == (True, 1.0) and (only.done, only.reward) == (True, 0.0)
    (verified,) = [body for path, body in server.seen if path == "/verify" and len(body["response"]["output"]) > 1]
    assert [item["type"] for item in verified["response"]["output"]] == [
        *("function_call", "function_call", "function_call_output", "function_call_output", "reasoning", "message")
    ]
    assert verified["response"]["output"][0]["arguments"] == '{"count": 4}'
    assert verified["response"]["output"][-1]["content"][0]["text"] == "7"
    assert server.seen[0][1] == ROW


def test_a_call_that_is_wrong_or_fails_is_told_to_the_model(server):
    async def episode():
        environment = NeMoGym(server.url, 10)
        wrong = await play(environment, turn("", ("increment", "'count' is missing")))
        server.is_broken = True
        failed = await play(environment, turn("", ("increment", {"count": 1})))
        reward = await environment.cut_short(PROBLEM, [])
        await environment.close()
        return wrong[0].messages[0]["content"], failed[0].messages[0]["content"], reward

    wrong, failed, reward = asyncio.run(episode())
    assert wrong == "error: 'count' is missing" and failed == '"ValueErro\n[12 more characters]' and reward == 0.0


def test_a_server_that_hangs_or_is_gone_costs_the_episode(server):
    environments = make_environments(config("nemo_gym", url=server.url, max_characters=100, timeout_s=2))

    def step(session: int, one: dict) -> object:
        async def ask():
            return await environments.step(session, PROBLEM, [*PROBLEM.messages, one])

        try:
            return asyncio.run(ask())
        except CallError as error:
            return str(error)

    assert step(0, turn("", ("value", {}))).messages[0]["content"] == '{"count": 3}'
    assert "no answer within environment.timeout_s = 2" in step(1, turn("", ("increment", {"count": 600})))
    server.shutdown()
    server.server_close()
    gone = step(0, turn("7"))
    assert f"EpisodeError: {server.url}/verify: " in gone
    check = config("nemo_gym", url=server.url, max_characters=100)
    with pytest.raises(ConfigError, match=rf"environment\.kwargs.*\n.*no server answers at {server.url}"):
        check_environment(check)
