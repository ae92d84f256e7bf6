"""`nrl-lite rehearse` finds the bugs of agents and environments, and nothing in good ones."""

import json

import pytest

from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rehearse import main

AGENTS = "tests.unit.rehearsal.agents"
PLAYER = f"agent.name={AGENTS}.player policy.max_total_sequence_length=96"
TOOLS = f"agent.name={AGENTS}.tool_player policy.max_total_sequence_length=1024 generation.max_new_tokens=160"
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
GOOD = (PLAYER, f"agent.name={AGENTS}.plain policy.max_total_sequence_length=96", TOOLS, ROOM, "environment=calculator")


def found(command: str, capsys) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as ended:
        main([*command_words(command), "--json", "--seconds", "2"])
    return ended.value.code, json.loads(capsys.readouterr().out)


def command_words(command: str) -> list[str]:
    """Split at spaces outside of quotes, which Hydra reads."""
    words = [""]
    for part in command.split(" "):
        words[-1] += part
        if words[-1].count("'") % 2 == 0:
            words.append("")
        else:
            words[-1] += " "
    return words[:-1]
