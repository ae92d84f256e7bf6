"""Tasks in Harbor's format, in a folder of this machine: commands of the policy, a harness, and the tests' reward."""

import asyncio
import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments.agents import Endpoint
from nemo_rl_lite.environments.harbor import TaskError, play, write_rows

TEST = """#!/bin/bash
mkdir -p /logs/verifier
cd /app && python3 -c 'from add import add; assert add(2, 3) == 5' && echo 1 > /logs/verifier/reward.txt \\
  || echo 0 > /logs/verifier/reward.txt
"""
FIX = "git log --oneline | wc -l && sed -i 's/a - b/a + b/' /app/add.py"


@pytest.fixture
def task(tmp_path) -> Path:
    """A repository with a wrong function, as a task."""
    folder = tmp_path / "tasks" / "add"
    (repository := folder / "environment" / "repository").mkdir(parents=True)
    (repository / "add.py").write_text("def add(a, b):\n    return a - b\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "All"],
    ):
        subprocess.run(["git", *command], cwd=repository, check=True)
    (folder / "environment" / "Dockerfile").write_text(
        "FROM python:3.12\nENV LANGUAGE=python\nWORKDIR /app\nCOPY repository .\n"
    )
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 20.0\n[verifier]\ntimeout_sec = 20.0\n")
    (folder / "instruction.md").write_text("Correct /app/add.py.")
    (folder / "tests").mkdir()
    (folder / "tests" / "test.sh").write_text(TEST)
    return folder


def problem(task: Path) -> Problem:
    write_rows(str(task.parent), str(rows := task.parent / "rows.jsonl"))
    (row,) = map(json.loads, rows.read_text().splitlines())
    return Problem(({"role": "user", "content": row["prompt"]},), "", row)


def reward(task: Path, url: str = "http://127.0.0.1:1/v1", **options) -> float:
    return asyncio.run(play(problem(task), Endpoint(url, "key", "policy"), runtime="local", **options))


@pytest.fixture
def policy():
    """An endpoint that calls the tool with `FIX`, then ends; and the requests that it got."""
    asked = []

    class Policy(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            function = {"name": "bash", "arguments": json.dumps({"command": FIX})}
            call = {"id": "call0", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            if len(asked) > 1:
                message = {"role": "assistant", "content": "done"}
            body = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *unused):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Policy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()


def test_the_policys_commands_change_the_workspace_that_the_tests_judge(task, policy):
    url, asked = policy
    assert reward(task, url) == 1
    first, second = asked
    assert first["messages"][0]["content"].endswith("/app/add.py.")
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][2]["content"].strip() == "1"
    assert "a - b" in (task / "environment" / "repository" / "add.py").read_text()


def test_a_harness_gets_instruction_endpoint_and_environment(task):
    command = 'test "$LANGUAGE$OPENAI_API_KEY" = pythonkey && test -n "$INSTRUCTION" && ' + FIX
    assert reward(task, command=command) == 1
    assert reward(task, command="true") == 0


def test_the_tests_judge_what_a_harness_left_at_its_limit(task):
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 1.0\n")
    assert reward(task, command=f"{FIX}; sleep 60") == 1


@pytest.mark.parametrize(
    ("text", "expected"), [('{"reward": 0.5, "lines": 3}', 0.5), ('{"style": 1, "speed": 0}', 0.5), ("0.25", 0.25)]
)
def test_rewards_are_read_from_json(task, text, expected):
    (task / "tests" / "test.sh").write_text(f"echo '{text}' > /logs/verifier/reward.json")
    assert reward(task, command="true") == expected


def test_tests_without_a_reward_fail_the_episode(task):
    (task / "tests" / "test.sh").write_text("echo broken; exit 3")
    with pytest.raises(TaskError, match="status 3 and wrote no reward: broken"):
        reward(task, command="true")


def test_a_folder_without_tests_is_no_task(task):
    (task / "tests" / "test.sh").unlink()
    with pytest.raises(TaskError, match=r"tests/test.sh is missing"):
        problem(task)
