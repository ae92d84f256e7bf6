"""Agents that start an unmodified harness: `agent=codex`.

Each episode has its own process, working folder and home folder. The configured reward scores the last
response. An agent with another reward calls `run_harness` and reads the folder.
"""

import asyncio
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments.agents import Endpoint

_SHOWN_CHARACTERS = 2000


async def mini_swe_agent(problem: Problem, endpoint: Endpoint, command: str = "mini") -> None:
    """Play an episode with mini-swe-agent. `command`: the program and further options. Raises what `run_harness`
    raises."""
    environment = {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    }
    model = ["--model", f"openai/{endpoint.model}", "--cost-limit", "0"]
    await _play(problem, command, [*model, "--yolo", "--exit-immediately", "--task"], environment)


async def codex(problem: Problem, endpoint: Endpoint, command: str = "codex exec") -> None:
    """Play an episode with Codex, which runs commands without its own sandbox. `command`: the program and further
    options. Raises what `run_harness` raises."""
    provider = f'{{name="run", base_url="{endpoint.base_url}", env_key="RUN_API_KEY", wire_api="responses"}}'
    options = ["-m", endpoint.model, "-c", 'model_provider="run"', "-c", f"model_providers.run={provider}"]
    options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--"]
    await _play(problem, command, options, {"RUN_API_KEY": endpoint.api_key})


async def claude_code(
    problem: Problem, endpoint: Endpoint, command: str = "claude --tools Bash --allowedTools Bash"
) -> None:
    """Play an episode with Claude Code. `command`: the program and further options. Raises what `run_harness`
    raises."""
    environment = {
        "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": endpoint.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    await _play(problem, command, ["--print", "--"], environment)


async def run_harness(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Run a harness in `folder`/work, with `folder`/home as its home folder, and return its output. Other processes of
    its group end with it.

    Raises:
        RuntimeError: the harness is not installed or fails; the message has the end of its output.
    """
    (folder / "home").mkdir()
    (folder / "work").mkdir()
    own = {**os.environ, "HOME": str(folder / "home"), **environment}
    try:
        status, said = await finished(command, cwd=folder / "work", env=own)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} is not on the PATH of this machine: install the harness") from error
    if status:
        raise RuntimeError(f"{command[0]} ended with status {status}: {said[-_SHOWN_CHARACTERS:]}")
    return said


async def finished(words: Sequence[str], **options: Any) -> tuple[int, str]:
    """Run a process in its own group, and return its exit status and output. Cancelling kills the group."""
    # A file, because processes that a command leaves in the background keep a pipe open.
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, **options
        )
        try:
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        said.seek(0)
        return status, said.read().decode(errors="replace")


async def _play(problem: Problem, command: str, options: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a harness with the problem's last message as its task."""
    task = problem.messages[-1]["content"]
    with tempfile.TemporaryDirectory() as folder:
        await run_harness([*shlex.split(command), *options, task], environment, Path(folder))
