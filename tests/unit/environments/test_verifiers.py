"""verifiers 0.4 plays episodes in its own Python, and its harness asks an endpoint.

It needs an environment with different releases of some packages:

    python -m venv /tmp/verifiers && /tmp/verifiers/bin/pip install 'verifiers>=0.4,<0.5' uv
    VERIFIERS_PYTHON=/tmp/verifiers/bin/python pytest tests/unit/environments/test_verifiers.py
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments.agents import Endpoint, Outcome
from nemo_rl_lite.environments.verifiers import EpisodeFailed, play, write_rows
from nemo_rl_lite.environments.verifiers_worker import metrics_of, reward_of
from tests.unit.servers import QuietHandler, serving

PYTHON = os.environ.get("VERIFIERS_PYTHON")
ENVIRONMENT = {
    "taskset": {"id": "tiny_taskset"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}
needs_verifiers = pytest.mark.skipif(PYTHON is None, reason="VERIFIERS_PYTHON is not set")


class Policy(QuietHandler):
    """Streams 321 as the answer of each chat, and notes the keys."""

    keys: ClassVar[set[str]] = set()

    def do_POST(self):
        self.keys.add(self.headers["authorization"])
        self.rfile.read(int(self.headers["content-length"]))
        shared = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
        said = {"index": 0, "delta": {"role": "assistant", "content": "321"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        events = [shared | {"choices": [said]}, shared | {"choices": [], "usage": usage}]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in [*map(json.dumps, events), "[DONE]"]:
            self.wfile.write(f"data: {event}\n\n".encode())


@pytest.fixture
def url():
    with serving(Policy) as url:
        yield f"{url}/v1"


@needs_verifiers
def test_tasks_are_rows_and_episodes_have_the_weighted_reward(tmp_path, url, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    write_rows(ENVIRONMENT, str(file := tmp_path / "rows.jsonl"), PYTHON)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["123", "456"]

    async def episode(row, key):
        problem = Problem(({"role": "user", "content": row["prompt"]},), "", row)
        return await play(problem, Endpoint(url, key, "policy"), ENVIRONMENT, PYTHON)

    async def both():
        calls = [episode(rows[0], "first"), episode(rows[0], "second"), episode(rows[1], "third")]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second, failed = asyncio.run(both())
    assert first == second == Outcome(1.0, {"reward/right": 1, "reward/digits": 1, "length": 3})
    assert isinstance(failed, EpisodeFailed) and "the board is broken" in str(failed)
    assert Policy.keys == {"Bearer first", "Bearer second", "Bearer third"}


def test_a_python_without_verifiers_fails_the_episode(tmp_path):
    problem = Problem(({"role": "user", "content": "1"},), "", {"task": "{}"})
    # verifiers may be installed here, too; -S leaves out all that is installed.
    (python := tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(EpisodeFailed, match="ended with status 1"):
        asyncio.run(play(problem, Endpoint("http://127.0.0.1:1/v1", "key", "policy"), ENVIRONMENT, str(python)))


def test_a_row_without_a_task_names_the_fix():
    problem = Problem(({"role": "user", "content": "1"},), "", {})
    with pytest.raises(KeyError, match="write_rows"):
        asyncio.run(play(problem, Endpoint("http://127.0.0.1:1/v1", "key", "policy"), ENVIRONMENT))
    with pytest.raises(KeyError, match=r"set agent.kwargs.environment"):
        asyncio.run(play(replace(problem, metadata={"task": "{}"}), Endpoint("", "key", "policy"), {}))


def test_another_process_follows_one_that_breaks_the_protocol(tmp_path):
    (python := tmp_path / "python").write_text(f"""#!/bin/sh
mkdir {tmp_path}/started && echo noise && exec sleep 30
read request && echo '{{"id": 0, "reward": 0.5, "metrics": {{"calls": 2}}}}'
""")
    python.chmod(0o755)
    problem = Problem(({"role": "user", "content": "1"},), "", {"task": "{}"})

    async def episode():
        playing = play(problem, Endpoint("http://127.0.0.1:1/v1", "key", "policy"), ENVIRONMENT, str(python))
        return await asyncio.wait_for(playing, 20)

    async def both():
        with pytest.raises(EpisodeFailed, match="ended with status -9"):
            await episode()
        return await episode()

    assert asyncio.run(both()) == Outcome(0.5, {"calls": 2})


def test_output_of_child_processes_is_no_answer(tmp_path, monkeypatch):
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "v1.py").write_text("""
import os
from types import SimpleNamespace

resolve_env_config = dict

def load_environment(config):
    os.system("echo noise")
    print("noise")
    return SimpleNamespace(taskset=[])
""")
    monkeypatch.chdir(tmp_path)
    write_rows({}, str(rows := tmp_path / "rows.jsonl"), sys.executable)
    assert rows.read_text() == ""


def test_an_episode_without_a_trainable_agent_names_the_cause():
    agent = SimpleNamespace(
        trainable=False, config=SimpleNamespace(client=SimpleNamespace(base_url="http://127.0.0.1:2/v1"))
    )
    episode = SimpleNamespace(ok=True, traces=[SimpleNamespace(agent=agent)])
    with pytest.raises(RuntimeError, match="no trace of a trainable agent"):
        reward_of(episode, "http://127.0.0.1:1/v1")


def test_metrics_are_means_over_the_trainable_agents_that_have_them():
    def trace(trainable, rewards, **metrics):
        return SimpleNamespace(agent=SimpleNamespace(trainable=trainable), rewards=rewards, metrics=metrics)

    scored = {"right": SimpleNamespace(score=1.0, value=0.75), "form": None}
    traces = [trace(True, scored, calls=2.0), trace(True, {}, calls=4.0, words=None), trace(False, scored, calls=90.0)]
    assert metrics_of(SimpleNamespace(traces=traces)) == {"reward/right": 1.0, "calls": 3.0}
