"""Tasks in Harbor's format, in a folder of this machine: commands of the policy, a harness, and the tests' reward."""

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments.agents import Endpoint, Outcome
from nemo_rl_lite.environments.harbor import TaskError, container_engine, play, write_rows
from tests.unit.servers import QuietHandler, serving

TEST = """#!/bin/bash
mkdir -p /logs/verifier
cd /app && python3 -c 'from add import add; assert add(2, 3) == 5' && echo 1 > /logs/verifier/reward.txt \\
  || echo 0 > /logs/verifier/reward.txt
"""
# Notes its calls and runs nothing.
ENGINE = """#!/bin/bash
echo "$@" >> {calls}
case "$1 ${{@: -1}}" in
  {fault}) echo broken; exit 3 ;;
  {slow}) exec sleep 30 ;;
  *reward.json) exit 1 ;;
  *reward.txt) echo 1 ;;
esac
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


def outcome(task: Path, url: str = "http://127.0.0.1:1/v1", **options) -> Outcome:
    return asyncio.run(play(problem(task), Endpoint(url, "key", "policy"), runtime="local", **options))


def reward(task: Path, url: str = "http://127.0.0.1:1/v1", **options) -> float:
    return outcome(task, url, **options).reward


@pytest.fixture
def policy():
    """An endpoint that calls the tool with `FIX`, then answers `last`; and the requests that it got."""
    asked, last = [], [200, {"choices": [{"message": {"role": "assistant", "content": "done"}}]}]

    class Policy(QuietHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            function = {"name": "bash", "arguments": json.dumps({"command": FIX})}
            call = {"id": "call0", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            status, said = last if len(asked) > 1 else (200, {"choices": [{"message": message}]})
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Policy) as url:
        yield f"{url}/v1", asked, last


def test_the_policys_commands_change_the_workspace_that_the_tests_judge(task, policy):
    url, asked, _ = policy
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


@pytest.mark.parametrize(
    "lines",
    [
        "COPY repository /testbed",
        "copy --chown=root:root --chmod=755 repository /testbed/\nCOPY --from=other /x /testbed/add.py",
        'COPY ["repository", "/testbed"]\nWORKDIR testbed',
        'ENV PATH="/root/.local/bin:$PATH" PLACE=/testbed\nWORKDIR $PLACE\nCOPY repository .',
        "ENV PLACE /testbed\nWORKDIR /\nCOPY repository ${PLACE}",
    ],
)
def test_dockerfiles_have_options_variables_and_relative_paths(task, lines):
    (task / "environment" / "Dockerfile").write_text(f"FROM python:3.12\n{lines}\n")
    (task / "tests" / "test.sh").write_text("grep -c 'a + b' /testbed/add.py > /logs/verifier/reward.txt")
    assert reward(task, command=f"cd /testbed && git status && {FIX.replace('/app', '/testbed')}") == 1


def test_programs_of_the_machine_stay_where_a_workspace_is_in_a_system_folder(task):
    (task / "environment" / "Dockerfile").write_text("FROM python:3.12\nWORKDIR /usr/src/app\nCOPY repository .\n")
    run = "/usr/bin/env python3 -c 'from add import add; print(add(2, 1))'"
    (task / "tests" / "test.sh").write_text(f"cd /usr/src/app && {run} > /logs/verifier/reward.txt")
    assert reward(task, command=f"/usr/bin/env {FIX.replace('/app', '/usr/src/app')}") == 3


def test_the_tests_judge_what_a_harness_left_at_its_limit(task):
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 1.0\n")
    assert reward(task, command=f"{FIX}; sleep 60") == 1


@pytest.mark.parametrize(
    ("text", "expected", "metrics"),
    [
        ('{"reward": 0.5, "lines": 3, "language": "Go"}', 0.5, {"lines": 3}),
        ('{"style": 1, "speed": 0}', 0.5, {"style": 1, "speed": 0}),
        ("0.25", 0.25, {}),
    ],
)
def test_rewards_and_metrics_are_read_from_json(task, text, expected, metrics):
    (task / "tests" / "test.sh").write_text(f"echo '{text}' > /logs/verifier/reward.json")
    assert outcome(task, command="true") == Outcome(expected, metrics)


def test_tests_without_a_reward_fail_the_episode(task):
    (task / "tests" / "test.sh").write_text("echo broken; exit 3")
    with pytest.raises(TaskError, match="status 3 and wrote no reward: broken"):
        reward(task, command="true")


def test_a_broken_task_is_named(task):
    (task / "task.toml").write_text("[agent\n")
    with pytest.raises(TaskError, match=r"task.toml: .* line 1"):
        problem(task)
    with pytest.raises(KeyError, match="no column task"):
        asyncio.run(play(Problem((), ""), Endpoint("http://127.0.0.1:1/v1", "key", "policy")))


def test_a_folder_without_tests_is_no_task(task):
    (task / "tests" / "test.sh").unlink()
    with pytest.raises(TaskError, match=r"tests/test.sh is missing"):
        problem(task)


@pytest.mark.parametrize(("text", "expected"), [(".33", 0.33), ("1.", 1), ("01", 1)])
def test_a_text_has_any_form_of_a_number(task, text, expected):
    (task / "tests" / "test.sh").write_text(f"echo {text} > /logs/verifier/reward.txt")
    assert reward(task, command="true") == expected


def test_a_harness_that_does_not_start_fails_the_episode(task):
    with pytest.raises(TaskError, match=r"'no-such-harness' ended with status 127: .*not found"):
        reward(task, command="no-such-harness")


def test_the_tests_judge_what_the_policy_left_at_the_context_limit(task, policy):
    url, _, last = policy
    last[:] = [400, {"error": {"code": "context_length_exceeded"}}]
    assert reward(task, url) == 1


def test_another_refusal_fails_the_episode(task, policy):
    url, _, last = policy
    last[:] = [400, {"error": {"code": None}}]
    with pytest.raises(httpx.HTTPStatusError):
        reward(task, url)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Install a container engine whose calls that match a pattern fail or hang; returns a function for its calls."""

    def install(fault: str = "none", slow: str = "none"):
        (folder := tmp_path / "bin").mkdir()
        calls = tmp_path / "calls"
        (folder / "docker").write_text(ENGINE.format(calls=calls, fault=fault, slow=slow))
        (folder / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return lambda: calls.read_text().splitlines()

    container_engine.cache_clear()
    yield install
    container_engine.cache_clear()


def contained(task: Path, **options):
    return play(problem(task), Endpoint("http://127.0.0.1:1/v1", "key", "policy"), runtime="docker", **options)


def test_samples_of_a_task_share_one_build(task, engine):
    calls = engine()

    async def three():
        return await asyncio.gather(*(contained(task, command="true") for _ in range(3)))

    assert asyncio.run(three()) == [Outcome(1)] * 3
    assert [sum(call.startswith(name) for call in calls()) for name in ("build", "run", "rm")] == [1, 3, 3]


def test_a_cancelled_start_removes_its_container(task, engine):
    calls = engine(slow="run*")

    async def cancelled():
        playing = asyncio.ensure_future(contained(task))
        # The file of the calls begins with `info`, which `play` waits for.
        await asyncio.sleep(0)
        while not any(call.startswith("run") for call in calls()):
            await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.wait({playing})

    asyncio.run(cancelled())
    (started,) = (call for call in calls() if call.startswith("run"))
    name = re.search(r"--name (\S+)", started)[1]
    assert calls()[-1] == f"rm --force {name}"
    # 20 s each for agent and verifier.
    assert started.endswith(" sleep 340")


def test_a_command_in_a_container_ends_at_the_agents_limit(task, engine):
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 0.5\n")
    calls = engine(slow="*my-harness")
    assert asyncio.run(contained(task, command="my-harness")) == Outcome(1)
    after = next(number for number, call in enumerate(calls()) if "kill -KILL -1" in call)
    assert "my-harness" in calls()[after - 1] and "rm -rf /tests" in calls()[after + 1]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("build*", "the image was not built"), ("run*", "no container started"), ("cp*", "not copied into the container")],
)
def test_an_engines_failure_has_its_output(task, engine, fault, message):
    engine(fault=fault)
    with pytest.raises(TaskError, match=f"{message}: broken"):
        asyncio.run(contained(task, command="true"))


def test_a_slow_build_names_its_limit(task, engine):
    (task / "task.toml").write_text("[environment]\nbuild_timeout_sec = 0.2\n")
    engine(slow="build*")
    with pytest.raises(TaskError, match=r"environment.build_timeout_sec = 0.2"):
        asyncio.run(contained(task, command="true"))
