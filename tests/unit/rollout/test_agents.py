"""Episodes that agents play over HTTP: what they train on, and what a failing agent costs."""

import asyncio
import json
import os
import sys
from dataclasses import replace

import pyarrow.parquet
import pytest

from nemo_rl_lite.config.schema import AgentConfig
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.environments.agents import Agents
from nemo_rl_lite.environments.registry import InThisProcess
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Completion, Unfinished
from nemo_rl_lite.rewards.registry import find_reward
from nemo_rl_lite.rollout.agents import AgentPlay
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutTask
from nemo_rl_lite.rollout.play import Turns
from nemo_rl_lite.rollout.store import RolloutFiles, rollout_files
from nemo_rl_lite.serving.server import Endpoint, ServedGeneration, bound_socket
from tests.unit.pages import DOCS, blocks
from tests.unit.rollout.script import Letters, Queue, collected_by, completion, judged_by, plain
from tests.unit.rollout.test_tool_turns import tokenizer_of
from tests.unit.serving.served import LOCAL, SAMPLING

PLAYERS = "tests.unit.rollout.players"
CALL, FINAL = "<calc>6*7</calc>", "43"
ASKED = "6*7+1?"
SAID = {f"{ASKED}|": CALL, f"{ASKED}|{CALL}\0" + "42|": FINAL}


class Book(Queue):
    """Engines that answer a prompt as a book says; what it does not have is `43`. `hanging` requests never end."""

    def __init__(self, said=SAID, hanging=0, error=None):
        self.said, self.hanging, self.error, self.asked, self.aborted = said, hanging, error, [], 0

    async def sample(self, request, conversation, progress=None):
        self.asked.append(request)
        text = "".join(map(chr, request.prompt))
        if self.error is not None and len(self.asked) > 1:
            raise self.error
        if len(self.asked) > 1 and self.hanging:
            self.hanging -= 1
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted += 1
        return completion(self.said.get(text, FINAL)), 0


class Speaker(Book):
    """Engines that say the responses in order, token by token to requests that stream."""

    def __init__(self, tokenizer, *said):
        super().__init__(said)
        self.tokenizer = tokenizer

    async def sample(self, request, conversation, progress=None):
        tokens = (*self.tokenizer._tokens(self.said[len(self.asked)]), *self.tokenizer.end_tokens)
        self.asked.append(request)
        for count in range(1, len(tokens) if request.streams else 1):
            progress(Unfinished(tokens[:count], (-0.5,) * count, "length", (0,) * count))
        return Completion(tokens, (-0.5,) * len(tokens), "stop", (0,) * len(tokens)), 0


def config(name, timeout_s=60.0, **kwargs):
    return AgentConfig(f"{PLAYERS}.{name}", timeout_s, 4, 1, 1.0, kwargs)


def collect(engines, agent, share=0.0, max_length=200, samples=1, tokenizer=None, sampling=SAMPLING):
    """Play some episodes of one prompt."""
    tokenizer = tokenizer or Letters()
    with bound_socket(LOCAL) as bound, Endpoint(bound, tokenizer, ["own"], max_length).running() as endpoint:
        play = AgentPlay(Agents(agent, "127.0.0.1"), endpoint, sampling)
        generation = ServedGeneration(engines, endpoint, None)
        return collector(generation, play, share, max_length, tokenizer).collect(task(samples, sampling))


def collector(generation, play, share=0.0, max_length=200, tokenizer=None):
    judge = judged_by(find_reward("exact_match", {}))
    return collected_by(generation, judge, max_length, ErrorShares(0.0, share), play, tokenizer)


def task(samples, sampling=SAMPLING):
    return RolloutTask([Problem(chat(ASKED), "43")].__getitem__, 1, samples, sampling, 5)


@pytest.mark.parametrize("agent", [config("player", how="two turns"), config("plain")], ids=["async", "plain"])
def test_an_agents_episode_is_that_of_an_environment_with_the_same_conversation(agent):
    through_environment, through_agent = Book(), Book()
    turns = Turns(InThisProcess("calculator", {"role": "user"}), 4)
    expected = collector(through_environment, turns).collect(task(2))
    found = collect(through_agent, agent, samples=2)
    assert plain(found.rows([0.5, -0.5], 0)) == plain(expected.rows([0.5, -0.5], 0))
    assert sum(found.rows([1.0, 1.0], 0)[0].mask) == 20
    assert sorted(one.seed for one in through_agent.asked) == sorted(one.seed for one in through_environment.asked)
    assert [one.said for one in found.episodes] == [one.said for one in expected.episodes]
    assert found.rewards_B.tolist() == expected.rewards_B.tolist() == [1, 1]
    assert {name: found.metrics()[name] for name in ("mean_env_tokens_per_sample", "natural_termination_rate")} == {
        "mean_env_tokens_per_sample": 3,
        "natural_termination_rate": 1,
    }
    first = found.episodes[0]
    assert [span.what for span in first.spans] == ["environment", "generate"] * 2 + ["environment"]
    assert first.seconds("environment") > 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "KeyError: 'state'"),
        ("dies", "the agent's process ended with status 7"),
        ("silent", "the agent asked the endpoint for no response"),
        ("hot", "temperature = 0.5: training samples with generation.temperature = 1.0"),
        ("reports text", "metric 'tool calls': the agent returned 'three', a str; a metric is one number"),
    ],
)
def test_an_agent_that_fails_costs_its_episode(how, said, caplog):
    rollout = collect(Book(), config("player", how=how), share=1.0)
    assert said in caplog.text and "the agent failed on" in caplog.text
    (episode,) = rollout.episodes
    assert episode.ending == "error" and episode.reward is None and not any(rollout.rows([1.0], 0)[0].mask)
    assert rollout.metrics()["environment_errors"] == 1 and rollout.metrics()["num_valid_samples"] == 0


def test_an_agent_reports_metrics_beside_its_reward():
    rollout = collect(Book(), config("player", how="reports"), samples=2)
    assert rollout.rewards_B.tolist() == [0.5, 0.5]
    assert rollout.episode_metrics() == {"episode/tool calls": 3, "episode/pass_1": 1}


def test_the_agent_of_the_docs(tmp_path, monkeypatch):
    (code,) = (text for text in blocks(DOCS / "agents.md", "python") if text.startswith("# my_package/twice.py"))
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "twice.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    agent = AgentConfig("my_package.twice.twice", 60.0, 4, 1, 0.0, {"first": 0.25})
    (episode,) = collect(Book(), agent).episodes
    assert episode.reward == 0.75 and [said["content"] for said in episode.said] == [CALL, "again", FINAL]


def test_a_temperature_that_is_the_default_of_the_apis_is_the_runs():
    engines, own = Book(), replace(SAMPLING, temperature=0.6)
    rollout = collect(engines, config("player", how="two turns"), sampling=own)
    assert rollout.environment_errors == 0 and {one.sampling.temperature for one in engines.asked} == {0.6}


ADDING = "<call=add><arg=a>41</arg></call>"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_an_agent_with_tools_trains_on_the_sampled_tokens_through_each_api(tmp_path, api, streams):
    tokenizer = tokenizer_of(tmp_path)
    speaker = Speaker(tokenizer, f"so {ADDING}", "42")
    agent = config("tool_player", api=api, streams=streams)
    (episode,) = (rollout := collect(speaker, agent, tokenizer=tokenizer)).episodes
    whole = tokenizer._tokenizer.decode(episode.tokens)
    assert whole == f"<bos><tool=add(a)>{ASKED}=so {ADDING}<eos>42=42<eos>"
    (row,) = rollout.rows([1.0], 0)
    sampled = [token for said in speaker.said for token in (*tokenizer._tokens(said), *tokenizer.end_tokens)]
    assert row.tokens[row.mask.astype(bool)].tolist() == sampled
    assert [list(request.prompt) for request in speaker.asked] == [episode.tokens[:start] for start, _ in episode.turns]
    assert episode.reward >= 5 if streams else episode.reward == 1, "text comes in pieces"
    called, told, said = episode.said
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 41}} and "tool_calls" not in said
    assert told == {"role": "tool", "content": "42", "name": "add", "tool_call_id": called["tool_calls"][0]["id"]}
    assert episode.tools[0]["function"]["name"] == "add"
    RolloutFiles(tmp_path, None, 0).write(1, "train", rollout)
    (row,) = pyarrow.parquet.read_table(rollout_files(tmp_path)[0]).to_pylist()
    assert json.loads(row["tools"])[0]["function"]["name"] == "add"


def trained_once(rollout, engines) -> None:
    """Each sampled token is trained once, in a row that has what the engine read before it."""
    (episode,) = rollout.episodes
    rows = rollout.rows([1.0], 0)
    assert len(rows) == len(episode.segments) and rows.mask.sum() == episode.generated
    prompts = [tuple(one.tokens[:start]) for one in episode.segments for start, _ in one.turns]
    assert sorted(prompts) == sorted(request.prompt for request in engines.asked)


@pytest.mark.parametrize("change", ["id", "arguments", "call", "tools", "system", "nothing that matters"])
def test_another_history_of_an_agent_with_tools_is_another_row(tmp_path, change):
    tokenizer = tokenizer_of(tmp_path)
    speaker, agent = Speaker(tokenizer, ADDING, "42"), config("tool_player", api="chat", change=change)
    rollout = collect(speaker, agent, tokenizer=tokenizer)
    assert len(rollout.episodes[0].segments) == 1 + (change != "nothing that matters")
    trained_once(rollout, speaker)


@pytest.mark.parametrize(
    ("how", "turns"),
    [
        # The last request goes on where the agent has begun.
        ("rewrites", [2, 1]),
        ("repeats", [2, 1]),
        ("prefills", [2, 1]),
        ("compacts", [2, 2]),
        ("delegates", [2, 1, 1, 1]),
        ("asks for choices", [2, 1, 1]),
    ],
)
def test_an_agent_may_change_its_history(how, turns):
    engines = Book({})
    rollout = collect(engines, config("player", how=how))
    (episode,) = rollout.episodes
    assert sorted(len(one.turns) for one in episode.segments) == sorted(turns) and episode.reward == 1
    trained_once(rollout, engines)
    assert len({request.seed for request in engines.asked}) == sum(turns)
    assert rollout.metrics()["max_segments_per_sample"] == len(turns)
    assert [span.what for span in episode.spans].count("environment") >= 3


class Backwards(Book):
    """Engines that answer the newest request first, each with its number."""

    async def sample(self, request, conversation, progress=None):
        self.asked.append(request)
        number = len(self.asked)
        await asyncio.sleep(0.3 - number / 20)
        return completion(str(number) if number < 3 else f"{number}..."), 0


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_choices_of_a_request_have_rows_and_rewards_in_their_order(streams):
    engines = Backwards()
    rollout = collect(engines, config("chooser", streams=streams))
    (episode,) = rollout.episodes
    trained_once(rollout, engines)
    said = [episode.segments[place].said[-1]["content"] for place in episode.order]
    assert [len(one.turns) for one in episode.segments] == [1, 1, 1] and episode.turn_rewards == [1, 2, 3]
    assert said == ["1", "2", "3"] and (episode.response, episode.ending) == ("3", "length")
    assert len({request.seed for request in engines.asked}) == 3


HARNESS = """#!{python}
import json, os, pathlib, sys, urllib.request
said = {{"model": os.environ["ANTHROPIC_MODEL"], "messages": [{{"role": "user", "content": sys.argv[-1]}}]}}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages?beta=true", json.dumps(said).encode())
request.add_header("Authorization", "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"])
with urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request) as said:
    pathlib.Path("answer.txt").write_text(json.load(said)["content"][0]["text"])
"""


def test_the_harness_of_the_docs(tmp_path, monkeypatch):
    (code,) = (text for text in blocks(DOCS / "agents.md", "python") if text.startswith("# my_package/harness.py"))
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "harness.py").write_text(code)
    (command := tmp_path / "claude").write_text(HARNESS.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.syspath_prepend(tmp_path)
    agent = AgentConfig("own_package.harness.written_answer", 60.0, 4, 1, 0.0, {})
    (episode,) = collect(Book({}), agent).episodes
    assert [said["content"] for said in episode.said] == [FINAL] and episode.reward == 1


def test_an_agent_that_hangs_is_late(caplog):
    rollout = collect(Book(), config("player", timeout_s=0.5, how="late"), share=1.0)
    assert "no answer within agent.timeout_s = 0.5" in caplog.text and rollout.environment_errors == 1


class Mute(Book):
    """Engines that answer nothing."""

    async def sample(self, request, conversation, progress=None):
        self.asked.append(request)
        await asyncio.Event().wait()


def test_an_agent_may_end_before_the_first_of_several_choices(caplog):
    rollout = collect(engines := Mute(), config("chooser", timeout_s=4.0, streams=False), share=1.0)
    assert len(engines.asked) == 3 and rollout.environment_errors == 1
    assert "no answer within agent.timeout_s = 4" in caplog.text


def test_without_a_reward_of_the_agent_the_configured_one_judges():
    assert collect(Book({}), config("player", how="judged")).rewards_B.tolist() == [1]
    assert collect(Book(), config("player", how="judged")).rewards_B.tolist() == [0]


def test_a_conversation_that_gets_too_long_is_cut_and_judged():
    rollout = collect(Book({}), config("player", how="endless"), max_length=60)
    (episode,) = rollout.episodes
    # 7 tokens of the prompt and 3 a turn; the messages between have 3, and a response may have 40.
    assert episode.ending == "length" and len(episode.turns) == 3 and len(episode.tokens) == 7 + 3 * 3 + 2 * 3
    assert episode.reward == 1 and rollout.environment_errors == 0


def test_an_agent_may_hang_up_and_ask_again():
    engines = Book(hanging=1)
    rollout = collect(engines, config("player", how="leaves"))
    assert engines.aborted == 1 and rollout.rewards_B.tolist() == [1] and rollout.environment_errors == 0
    # The agent may ask again before the server has noticed that it hung up. Then another segment begins.
    assert rollout.episodes[0].turn_count == 2
    assert len({one.seed for one in engines.asked}) == 1 + len(rollout.episodes[0].segments)


def test_a_failing_engine_is_the_runs_error_and_not_the_agents():
    with pytest.raises(EngineError, match="not finite"):
        collect(Book(error=EngineError("not finite")), config("player", how="two turns"), share=1.0)
