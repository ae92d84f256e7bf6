"""`nrl-lite rehearse` finds the bugs of agents and environments, and nothing in good ones."""

import json
import shlex

import pytest

from nemo_rl_lite.rehearse import main
from tests.unit.pages import DOCS, blocks

AGENTS = "tests.unit.rehearsal.agents"
PLAYER = f"agent.name={AGENTS}.player policy.max_total_sequence_length=96"
TOOLS = f"agent.name={AGENTS}.tool_player policy.max_total_sequence_length=128 generation.max_new_tokens=40"
ROOM = f"environment.name={AGENTS}.Room environment.max_turns=3 policy.max_total_sequence_length=96"
BUGS = {
    f"{PLAYER} +agent.kwargs.bug=silent": "asked the endpoint for no response",
    f"{PLAYER} +agent.kwargs.bug='always pays'": "right and wrong answers have the reward 1",
    f"{PLAYER} +agent.kwargs.bug=temperature": "a request is refused: temperature = 0.3",
    f"{PLAYER} +agent.kwargs.bug=retries": "a refused request is sent again and again",
    f"{PLAYER} +agent.kwargs.bug='shares state'": "a response of another episode",
    f"{PLAYER} +agent.kwargs.bug='leaves processes'": "processes are left behind, such as sleep",
    f"{PLAYER} +agent.kwargs.bug='leaves files'": "temporary files are left behind",
    f"{PLAYER} +agent.kwargs.bug=endless": "the agent does not end",
    f"{PLAYER} +agent.kwargs.bug=random": "equal responses lead to different messages",
    f"{PLAYER} +agent.kwargs.bug=blocks": "a blocking client",
    f"{PLAYER} +agent.kwargs.bug='needs text'": "the agent fails: IndexError: no words",
    f"{PLAYER} +agent.kwargs.bug='needs a number'": "the agent fails: ValueError: invalid literal",
    f"{PLAYER} +agent.kwargs.bug='changes answers'": "because message 2 changes",
    f"{PLAYER} +agent.kwargs.bug='changes the first message'": "because message 1 changes",
    f"{PLAYER} +agent.kwargs.bug='no number'": "a reward is one number",
    f"{PLAYER} +agent.kwargs.bug='not finite'": "the agent returned nan",
    f"{TOOLS} +agent.kwargs.bug='needs known tools'": "AssertionError: unknown tool",
    f"{TOOLS} +agent.kwargs.bug='ignores calls'": "a call of add has no result",
    f"{ROOM} +environment.kwargs.bug='too long'": "leave no room for the next response",
    f"{ROOM} +environment.kwargs.bug='never done'": "no episode ends before environment.max_turns",
}
GOOD = (
    "",
    "environment=calculator",
    "environment=python policy.max_total_sequence_length=112 generation.max_new_tokens=48",
    ROOM,
    PLAYER,
    f"agent.name={AGENTS}.plain policy.max_total_sequence_length=96",
    TOOLS,
)


def rehearsed(command: str, capsys) -> tuple[int, dict]:
    """The exit status and the record of a rehearsal."""
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(command), "--json", "--seconds", "2"])
    return ended.value.code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("command", "what"), BUGS.items())
def test_a_bug_is_found(capsys, command, what):
    status, record = rehearsed(command, capsys)
    found = [one for one in record["findings"] if what in f"{one['what']} {one['fix']}"]
    assert found, record["findings"]
    assert status == any(one["level"] == "fault" for one in record["findings"])


@pytest.mark.parametrize("command", GOOD)
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
    assert "episode 1 (right answer), row 1" in shown and "20 episodes, 0 faults" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("<bos>")]
    prompt, _, response = row.removeprefix("<bos>").partition("=[")
    assert response == f"{prompt[::-1]}<eos>]"


def test_an_algorithm_without_episodes_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["algorithm=sft"])
    assert ended.value.code == 2 and "algorithm = 'sft'" in capsys.readouterr().err
