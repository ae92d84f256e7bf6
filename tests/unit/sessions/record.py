"""Records a session of a harness: `python -m tests.unit.sessions.record AGENT COMMAND FILE [MAX_LENGTH]`.

The policy says the texts of `SAID`. The file has the answered requests in their order, without the harness' own texts:
roles, types, keys, tools, and which texts are equal.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.schema import AgentConfig
from nemo_rl_lite.environments.agents import Agents
from nemo_rl_lite.rollout.agents import AgentPlay
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.serving import server
from nemo_rl_lite.serving.server import Endpoint, ServedGeneration, bound_socket
from tests.unit.rollout.test_agents import Speaker, collector, task
from tests.unit.rollout.test_tool_turns import template, tokenizer_of
from tests.unit.serving.served import LOCAL, SAMPLING

# Their values belong to the protocols. Other texts are replaced.
KEPT = {"model", "role", "type", "name", "status", "tool_choice"}
BILLING = "x-anthropic-billing-header"


def call(name: str, **arguments: Any) -> str:
    """A call in the form of the chat template."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calls(name: str, argument: str) -> dict[str, str]:
    """Calls of a shell."""
    commands = {
        "list": "ls",
        "place": "pwd",
        "long": "seq 2500",
        "submit": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    }
    return {key: call(name, **{argument: command}) for key, command in commands.items()}


CLAUDE, CODEX, MINI = calls("Bash", "command"), calls("exec_command", "cmd"), calls("bash", "command")
# Parallel calls first. The text before the last is the summary of a compaction, for which results are long.
SAID = {
    "claude_code": [f"I look.{CLAUDE['list']}{CLAUDE['place']}", *[CLAUDE["long"]] * 2, "One folder.", "It is empty."],
    "codex": [
        f"I look.{CODEX['list']}{CODEX['place']}",
        CODEX["long"] * 2,
        CODEX["list"],
        "One folder.",
        "It is empty.",
    ],
    # It repeats no response without a call.
    "mini_swe_agent": [f"I look.{MINI['list']}{MINI['place']}", "One folder.", MINI["submit"]],
}


def played(agents: Any, said: list[str], max_length: int, folder: Path, entries: list[dict]) -> tuple[Rollout, Speaker]:
    """Play an episode. Return the rollout and the policy. `entries` gets each request, and its replies."""
    tokenizer = tokenizer_of(folder, template("qwen3_instruct_2507.jinja"), "<|im_end|>")
    policy, apis = Speaker(tokenizer, *said), dict(server._APIS)
    server._APIS.update({path: _recorded(path, kind, entries) for path, kind in apis.items()})
    try:
        with bound_socket(LOCAL) as bound, Endpoint(bound, tokenizer, ["own"], max_length).running() as endpoint:
            play = AgentPlay(agents, endpoint, SAMPLING)
            generation = ServedGeneration(policy, endpoint, None)
            rollout = collector(generation, play, 1.0, max_length, tokenizer).collect(task(1))
    finally:
        server._APIS.update(apis)
    return rollout, policy


def _recorded(path: str, kind: Any, entries: list[dict]) -> Any:
    """An exchange that adds its request to `entries`, and to that the replies."""

    class Recorded(kind):
        @classmethod
        def read(cls, content, *others):
            entries.append(entry := {"path": path, "body": content})
            made = super().read(content, *others)
            made.entry = entry
            return made

        def body(self, answer):
            self.entry["replies"] = answer.replies
            return super().body(answer)

        def ended(self, answer):
            self.entry["replies"] = answer.replies
            return super().ended(answer)

    return Recorded


class Shapes:
    """Replaces texts by short ones, and equal texts by equal ones. Those of the policy stay."""

    def __init__(self, entries: list[dict]):
        replies = [reply for entry in entries for reply in entry["replies"]]
        calls = [one for reply in replies for one in reply.calls]
        own = [reply.text for reply in replies]
        own += [text for one in calls for text in one["function"]["arguments"].values()]
        self._texts = {text: text for text in ("", *own)}
        self._texts |= {one["id"]: f"call {number}" for number, one in enumerate(calls)}

    def text(self, text: str) -> str:
        short = f"text {len(self._texts)}"
        return self._texts.setdefault(text, f"{BILLING}: {short}" if text.startswith(BILLING) else short)

    def of(self, value: Any, key: str = "") -> Any:
        match value:
            case {"type": "object", "properties": properties}:
                own = {name: {"type": one.get("type", "string")} for name, one in properties.items()}
                return {"type": "object", "properties": own, "required": value.get("required", [])}
            case dict():
                return {name: self.of(one, name) for name, one in value.items()}
            case list():
                return [self.of(one, key) for one in value]
            case str() if key == "arguments":
                return json.dumps(self.of(json.loads(value)))
            case str() if key not in KEPT:
                return self.text(value)
        return value


def main(name: str, command: str, file: str, max_length: str = "400000") -> None:
    config = AgentConfig(f"nemo_rl_lite.environments.harnesses.{name}", 120.0, 1, 1, 1.0, {"command": command})
    entries: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        agents = Agents(config, "127.0.0.1")
        rollout, policy = played(agents, SAID[name], int(max_length), Path(folder), entries)
    (episode,), answered = rollout.episodes, [entry for entry in entries if "replies" in entry]
    assert episode.failure is None and len(policy.asked) == len(policy.said), (episode, len(policy.asked))
    shapes = Shapes(answered)
    requests = [
        {
            "path": entry["path"],
            "calls": [shapes.text(one["id"]) for reply in entry["replies"] for one in reply.calls],
            "body": shapes.of(entry["body"]),
        }
        for entry in answered
    ]
    heard = {"said": policy.said, "turns": [len(one.turns) for one in episode.segments]}
    # A line for each request.
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in requests)
    Path(file).write_text(f'{json.dumps(heard)[:-1]}, "requests": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
