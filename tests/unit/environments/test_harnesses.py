"""Programs instead of harnesses: what they are given, and what remains of them."""

import asyncio
import json
import os
import time
from pathlib import Path

import psutil
import pytest

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments.agents import Endpoint
from nemo_rl_lite.environments.harnesses import claude_code, codex, mini_swe_agent, run_harness

PROBLEM = Problem(({"role": "system", "content": "Be brief."}, {"role": "user", "content": "-5 + 3?"}), "-2")
ENDPOINT = Endpoint("http://127.0.0.1:7/v1", "secret", "policy")


@pytest.fixture
def program(tmp_path) -> Path:
    """A program that writes its arguments, environment and folder."""
    (file := tmp_path / "program").write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], open({str(tmp_path / 'given')!r}, 'w'))\n"
    )
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("agent", "variables", "options"),
    [
        (
            claude_code,
            {"ANTHROPIC_BASE_URL": "http://127.0.0.1:7", "ANTHROPIC_AUTH_TOKEN": "secret", "ANTHROPIC_MODEL": "policy"},
            "",
        ),
        (codex, {"RUN_API_KEY": "secret"}, '-m policy base_url="http://127.0.0.1:7/v1"'),
        (mini_swe_agent, {"OPENAI_BASE_URL": ENDPOINT.base_url, "OPENAI_API_KEY": "secret"}, "--model openai/policy"),
    ],
)
def test_a_harness_is_given_endpoint_and_task(agent, variables, options, program):
    asyncio.run(agent(PROBLEM, ENDPOINT, command=f"{program} --limit 'two words'"))
    arguments, environment, folder = json.loads((program.parent / "given").read_text())
    assert arguments[:2] == ["--limit", "two words"] and arguments[-1] == "-5 + 3?"
    # The task is no option, whatever it begins with.
    assert arguments[-2] in ("--", "--task")
    assert all(option in " ".join(arguments) for option in options.split())
    assert variables.items() <= environment.items()
    assert environment["HOME"] != os.environ.get("HOME") and not Path(folder).exists()


def test_a_harness_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"sh ended with status 3: no such model"):
        asyncio.run(run_harness(["sh", "-c", "echo no such model >&2; exit 3"], {}, tmp_path))


def test_a_harness_that_is_not_installed_is_named():
    with pytest.raises(RuntimeError, match="no-such-harness is not on the PATH"):
        asyncio.run(mini_swe_agent(PROBLEM, ENDPOINT, command="no-such-harness --fast"))


def test_a_command_in_the_background_ends_with_its_harness(tmp_path):
    began = time.monotonic()
    said = asyncio.run(run_harness(["sh", "-c", "sleep 60 & echo $!"], {}, tmp_path))
    assert time.monotonic() - began < 30 and is_gone(int(said))


def test_a_cancelled_harness_ends_with_its_commands(tmp_path):
    async def cancelled() -> int:
        playing = asyncio.create_task(run_harness(["sh", "-c", "sleep 60 & echo $! > pid; wait"], {}, tmp_path))
        while not ((pid := tmp_path / "work" / "pid").is_file() and (said := pid.read_text())):
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        return int(said)

    assert is_gone(asyncio.run(cancelled()))


def is_gone(pid: int) -> bool:
    """Return whether a killed process ends."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False
