"""`nrl-lite rehearse` finds the bugs of agents and environments, and nothing in good ones."""

import json
import shlex
import time

import pytest

from nemo_rl_lite.rehearse import main
from tests.unit.pages import DOCS, blocks

AGENTS = "tests.unit.rehearsal.agents"
PLAYER = f"agent.name={AGENTS}.player policy.max_total_sequence_length=96"
TOOLS = f"agent.name={AGENTS}.tool_player policy.max_total_sequence_length=128 generation.max_new_tokens=40"
ROOM = f"environment.name={AGENTS}.Room environment.max_turns=3 policy.max_total_sequence_length=96"
# The bugs of an agent or environment, and of each what is found. There are 31.
BUGS = {
    f"{PLAYER} '+agent.kwargs.bugs=[silent]'": ["asked the endpoint for no response"],
    f"{PLAYER} '+agent.kwargs.bugs=[always pays,leaves processes,leaves files,needs text,changes answers]'": [
        "right and wrong answers have the reward 1",
        "processes are left behind, such as sleep",
        "temporary files are left behind",
        "the agent fails: IndexError: no words",
        "because message 2 changes",
    ],
    f"{PLAYER} '+agent.kwargs.bugs=[random,needs a number]'": [
        "equal responses lead to different messages",
        "the agent fails: ValueError: invalid literal",
    ],
    f"{PLAYER} '+agent.kwargs.bugs=[temperature]'": ["a request is refused: temperature = 0.3"],
    f"{PLAYER} '+agent.kwargs.bugs=[retries]' --seconds 2": ["a refused request is sent again and again"],
    f"{PLAYER} '+agent.kwargs.bugs=[shares state]'": ["a response of another episode"],
    f"{PLAYER} '+agent.kwargs.bugs=[endless]' --seconds 1": ["the agent does not end"],
    f"{PLAYER} '+agent.kwargs.bugs=[goes on]' --seconds 2": ["the agent still runs 1 s after its episode ended"],
    f"{PLAYER} '+agent.kwargs.bugs=[ends its process only after a response,locks]'": [
        "an agent whose request fails leaves behind sleep",
        "episodes fail after a process of user code was killed: FileExistsError",
    ],
    f"{PLAYER} '+agent.kwargs.bugs=[blocks]'": ["a blocking client"],
    f"{PLAYER} '+agent.kwargs.bugs=[changes the first message]'": ["because message 1 changes"],
    f"{PLAYER} '+agent.kwargs.bugs=[wrong sign,leaks the answer]'": [
        "right answers have lower rewards than wrong ones",
        "the first request has the answer of the problem",
    ],
    f"{PLAYER} '+agent.kwargs.bugs=[random reward]'": ["equal responses have the rewards"],
    f"{PLAYER} '+agent.kwargs.bugs=[remembers rewards]'": ["a wrong answer has the reward 1 of an earlier"],
    f"{TOOLS} '+agent.kwargs.bugs=[wrong ids]'": ["a result has the tool_call_id 'call' of no call"],
    f"{TOOLS} '+agent.kwargs.bugs=[long results]'": ["a call and its result leave no room"],
    f"{PLAYER} '+agent.kwargs.bugs=[no number]'": ["a reward is one number"],
    f"{PLAYER} '+agent.kwargs.bugs=[not finite]'": ["the agent returned nan"],
    f"{TOOLS} '+agent.kwargs.bugs=[needs known tools,ignores calls]'": [
        "AssertionError: unknown tool",
        "a call of add has no result",
    ],
    f"{TOOLS} '+agent.kwargs.bugs=[drops texts]'": ["because message 2 changes"],
    f"{ROOM} '+environment.kwargs.bugs=[too long]'": ["leave no room for the next response"],
    f"{ROOM} '+environment.kwargs.bugs=[wrong role]'": ["the environment always fails", "human"],
    f"{ROOM} '+environment.kwargs.bugs=[never done]'": ["no episode ends before environment.max_turns"],
}
# A rehearsal with a bug takes less, in seconds.
AT_MOST_S = 30
GOOD = (
    "",
    "environment=calculator",
    "environment=python policy.max_total_sequence_length=128 generation.max_new_tokens=40",
    ROOM,
    PLAYER,
    f"{PLAYER} agent.concurrency=1",
    f"agent.name={AGENTS}.plain policy.max_total_sequence_length=96",
    TOOLS,
)


def rehearsed(command: str, capsys) -> tuple[int, dict]:
    """The exit status and the record of a rehearsal."""
    with pytest.raises(SystemExit) as ended:
        main(["--json", *shlex.split(command)])
    return ended.value.code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("command", "what"), BUGS.items(), ids=range(len(BUGS)))
def test_bugs_are_found_in_seconds(capsys, command, what):
    begun = time.perf_counter()
    status, record = rehearsed(command, capsys)
    assert time.perf_counter() - begun < AT_MOST_S
    found = [f"{one['what']} {one['fix']}" for one in record["findings"]]
    assert [one for one in what if not any(one in text for text in found)] == [], found
    assert status == any(one["level"] == "fault" for one in record["findings"])


@pytest.mark.parametrize("command", GOOD, ids=range(len(GOOD)))
def test_good_code_has_no_faults(capsys, command):
    status, record = rehearsed(command, capsys)
    assert record["findings"] == [] and status == 0
    by_script = {one["script"]: one for one in record["episodes"]}
    assert by_script["right answer"]["reward"] > by_script["wrong answer"]["reward"]


def test_the_agent_of_the_documentation_has_no_faults(capsys, tmp_path, monkeypatch):
    (tmp_path / "page_agent.py").write_text(blocks(DOCS / "agents.md", "python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    command = "agent.name=page_agent.twice +agent.kwargs.first=0.3 policy.max_total_sequence_length=48"
    assert rehearsed(command, capsys)[1]["findings"] == []


def test_rows_of_an_episode_are_shown_with_trained_text_in_brackets(capsys):
    with pytest.raises(SystemExit):
        main(["--show", "1"])
    shown = capsys.readouterr().out
    assert "episode 1 (right answer), row 1" in shown and "21 episodes, 0 faults" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("<bos>")]
    prompt, _, response = row.removeprefix("<bos>").partition("=[")
    assert response == f"{prompt[::-1]}<eos>]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["algorithm=sft"], "algorithm = 'sft'"),
        (["--seconds", "0"], "--seconds = 0.0"),
        (["--seconds", "nan"], "--seconds = nan"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err
