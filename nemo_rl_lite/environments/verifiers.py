"""Agent that plays environments of verifiers (0.4): a taskset, a harness and a runtime.

verifiers needs other releases of some packages than vLLM, so it has its own Python. A process of that Python
(`verifiers_worker.py`) plays the episodes of an agent's process, and its harness asks the policy's endpoint.
"""

import asyncio
import itertools
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments.agents import Endpoint, Outcome

# -P: the folder of the script has modules that are not the worker's.
_WORKER = ("-P", str(Path(__file__).with_name("verifiers_worker.py")))
# Of a line, which has a task.
_MAX_LINE_BYTES = 2**26


class EpisodeFailed(Exception):
    """The environment's own error, which verifiers reports."""


async def play(problem: Problem, endpoint: Endpoint, environment: Mapping[str, Any], python: str = "python") -> Outcome:
    """Play one episode, and return its reward, the weighted sum of a trace's rewards, and its metrics.

    `environment` is verifiers' table `env`, and `python` the interpreter that has verifiers. Rows are those of
    `write_rows`. Raises EpisodeFailed, and KeyError: `environment` is empty, or the row has no column `task`.
    """
    if "task" not in problem.metadata:
        raise KeyError("the row has no column task: write the rows with nemo_rl_lite.environments.verifiers.write_rows")
    if not environment:
        raise KeyError("set agent.kwargs.environment, such as agent.kwargs.environment.taskset.id=NAME")
    worker = _workers.get(key := (python, _as_json(environment)))
    if worker is None:
        worker = _workers[key] = asyncio.ensure_future(_Worker.start(*key))
    request = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
    return await (await asyncio.shield(worker)).play({"task": problem.metadata["task"], **request})


def write_rows(environment: Mapping[str, Any], path: str, python: str = "python") -> None:
    """Write the tasks of an environment as JSON lines, for data=file. Raises CalledProcessError."""
    with Path(path).open("w") as rows:
        subprocess.run([python, *_WORKER, "rows", _as_json(environment)], stdout=rows, check=True)


class _Worker:
    """The process of verifiers, and the episodes that it plays."""

    def __init__(self, key: tuple[str, str], process: asyncio.subprocess.Process):
        self._key, self._process, self._numbers = key, process, itertools.count()
        self._playing: dict[int, asyncio.Future[Outcome]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, python: str, environment: str) -> "_Worker":
        """Start the process. Raises OSError: there is no such interpreter."""
        pipe = asyncio.subprocess.PIPE
        command = [python, *_WORKER, "play", environment]
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=_MAX_LINE_BYTES)
        return cls((python, environment), process)

    async def play(self, request: Mapping[str, Any]) -> Outcome:
        """Return the episode's reward and metrics. A cancelled call ends the episode."""
        number = next(self._numbers)
        answer = self._playing[number] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            raise self._ended()
        self._send({"id": number, **request})
        try:
            return await answer
        except asyncio.CancelledError:
            self._send({"id": number})
            raise
        finally:
            del self._playing[number]

    def _send(self, request: Mapping[str, Any]) -> None:
        self._process.stdin.write(json.dumps(request).encode() + b"\n")  # pyrefly: ignore  # a pipe

    async def _read(self) -> None:
        try:
            while line := await self._process.stdout.readline():  # pyrefly: ignore  # a pipe
                self._note(json.loads(line))
        except BaseException:
            self._process.kill()
            raise
        finally:
            # The next episode starts another process.
            del _workers[self._key]
            await self._process.wait()
            for answer in self._playing.values():
                if not answer.done():
                    answer.set_exception(self._ended())

    def _note(self, result: Mapping[str, Any]) -> None:
        answer = self._playing.get(result["id"])
        if answer is None or answer.done():
            return
        if "error" in result:
            answer.set_exception(EpisodeFailed(result["error"]))
        else:
            answer.set_result(Outcome(result["reward"], result["metrics"]))

    def _ended(self) -> EpisodeFailed:
        return EpisodeFailed(f"the process of verifiers ended with status {self._process.returncode}: see its output")


_workers: dict[tuple[str, str], asyncio.Future[_Worker]] = {}


def _as_json(environment: Mapping[str, Any]) -> str:
    return json.dumps(environment, sort_keys=True, default=dict)
