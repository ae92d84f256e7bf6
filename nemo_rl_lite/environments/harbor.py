"""Agent that works on tasks in Harbor's format: a folder with instruction, environment and tests.

    task.toml            time limits, image, variables
    instruction.md       the prompt
    environment/         Dockerfile and its files
    tests/test.sh        writes the reward to /logs/verifier/reward.txt or reward.json

The harness works in the task's workspace. Then the tests are copied there and run. Source: harbor 0.26,
`models/task/` and `verifier/verifier.py`.
"""

import asyncio
import hashlib
import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any

import httpx

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments.agents import Endpoint, Outcome
from nemo_rl_lite.environments.harnesses import finished

_PLAY_S, _BUILD_S = 600.0, 600.0
# Of a container, beyond the limits of agent and verifier.
_SPARE_S = 300.0
_MAX_CHARACTERS = 10_000
# Folders that programs of this machine need.
_SYSTEM = {
    "bin",
    "dev",
    "etc",
    "home",
    "lib",
    "lib64",
    "opt",
    "proc",
    "root",
    "run",
    "sbin",
    "srv",
    "sys",
    "tmp",
    "usr",
    "var",
}
# Statuses of a shell that cannot start a command.
_NOT_STARTED = (126, 127)
_BASH = {
    "name": "bash",
    "description": "Run a command in the workspace.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}


class TaskError(Exception):
    """The task is wrong, or its tests gave no reward."""


@dataclass(frozen=True)
class Task:
    """A task's folder and its `task.toml`."""

    folder: Path
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Task":
        """Read a task. Raises TaskError: a file is missing, or the task has parts that are not supported."""
        for name in ("task.toml", "instruction.md", "tests/test.sh"):
            if not (folder / name).is_file():
                raise TaskError(f"{folder} is no task of Harbor: {name} is missing")
        try:
            config = tomllib.loads((folder / "task.toml").read_text())
        except tomllib.TOMLDecodeError as error:
            raise TaskError(f"{folder / 'task.toml'}: {error}") from error
        if config.get("steps"):
            raise TaskError(f"{folder}: tasks with several steps are not supported")
        return cls(folder, config)

    def setting(self, section: str, name: str, default: Any) -> Any:
        """Return a value of `task.toml`."""
        value = self.config.get(section, {}).get(name)
        return default if value is None else value

    def limit(self, section: str) -> float:
        """Return the time limit of `agent` or `verifier`, in seconds."""
        return self.setting(section, "timeout_sec", _PLAY_S)

    @property
    def dockerfile(self) -> Path:
        """Its path; tasks with an image may have none."""
        return self.folder / "environment" / "Dockerfile"


def write_rows(folder: str, path: str) -> None:
    """Write the tasks of a folder as JSON lines, for data=file. Raises TaskError: a task is wrong, or there is none."""
    tasks = [Task.read(file.parent.resolve()) for file in sorted(Path(folder).rglob("task.toml"))]
    if not tasks:
        raise TaskError(f"{folder} has no folder with a task.toml")
    prompts = [(one.folder / "instruction.md").read_text() for one in tasks]
    rows = [{"prompt": p, "answer": "", "task": str(one.folder)} for p, one in zip(prompts, tasks, strict=True)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


async def play(
    problem: Problem, endpoint: Endpoint, runtime: str = "auto", command: str | None = None, max_turns: int = 32
) -> Outcome:
    """Work on one task, and return the reward of its tests. Several numbers of the tests are also metrics.

    `command` is a harness that starts in the workspace. Its `variables` have instruction and endpoint. Without one,
    the policy gets a tool that runs commands, for at most `max_turns` responses.

    Raises TaskError, KeyError: the row has no column `task`, and ValueError: `runtime` cannot be used.
    """
    if "task" not in problem.metadata:
        raise KeyError("the row has no column task: write the rows with nemo_rl_lite.environments.harbor.write_rows")
    task = Task.read(Path(str(problem.metadata["task"])))
    async with workspace(task, runtime) as space:
        instruction = space.text((task.folder / "instruction.md").read_text())
        if command is None:
            working = bash_loop(space, instruction, endpoint, max_turns)
        else:
            working = _harness(space, command, variables(endpoint, instruction))
        # As in Harbor, the tests judge what an agent left at its limit.
        with suppress(TimeoutError):
            await asyncio.wait_for(working, task.limit("agent"))
        return await verify(task, space)


async def _harness(space: "Workspace", command: str, own: Mapping[str, str]) -> None:
    status, said = await space.run(command, own)
    # The tests judge what a harness left that failed later, as at the context limit.
    if status in _NOT_STARTED:
        raise TaskError(f"agent.kwargs.command = {command!r} ended with status {status}: {said[-500:]}")


def variables(endpoint: Endpoint, instruction: str) -> dict[str, str]:
    """Return the environment variables of a harness."""
    return {
        "INSTRUCTION": instruction,
        "MODEL": endpoint.model,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
    }


async def bash_loop(space: "Workspace", instruction: str, endpoint: Endpoint, max_turns: int) -> None:
    """Run the commands that the policy calls, until a response without a call, or until the context is full."""
    messages: list[Any] = [{"role": "user", "content": instruction}]
    keys = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with httpx.AsyncClient(headers=keys, timeout=None, trust_env=False) as client:
        for _ in range(max_turns):
            body = {"model": endpoint.model, "messages": messages, "tools": [{"type": "function", "function": _BASH}]}
            response = await client.post(f"{endpoint.base_url}/chat/completions", json=body)
            if response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded":
                return
            response.raise_for_status()
            message = response.json()["choices"][0]["message"]
            if not (calls := message.get("tool_calls")):
                return
            messages.append(message)
            for call in calls:
                said = await _called(space, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})


async def _called(space: "Workspace", function: Mapping[str, Any]) -> str:
    try:
        command = json.loads(function["arguments"])["command"]
    except (ValueError, KeyError, TypeError):
        command = None
    if function["name"] != "bash" or not isinstance(command, str):
        return "error: call bash with a command"
    status, said = await space.run(command, {})
    if len(said) > _MAX_CHARACTERS:
        said = f"{said[: _MAX_CHARACTERS // 2]}\n...\n{said[-_MAX_CHARACTERS // 2 :]}"
    return said if status == 0 else f"{said}\nexit status {status}"


async def verify(task: Task, space: "Workspace") -> Outcome:
    """Run the tests and return their outcome: that of `reward.json`, or else of `reward.txt`. Raises TaskError."""
    await space.run("rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier", {})
    await space.copy(task.folder / "tests", "/tests")
    limit, given = task.limit("verifier"), task.setting("verifier", "env", {})
    own = {name: os.path.expandvars(str(value)) for name, value in given.items()}
    try:
        status, said = await asyncio.wait_for(space.run("bash /tests/test.sh", own), limit)
    except TimeoutError:
        raise TaskError(f"{task.folder.name}: tests/test.sh exceeded verifier.timeout_sec = {limit}") from None
    for name in ("reward.json", "reward.txt"):
        missing, text = await space.run(f"cat /logs/verifier/{name}", {})
        if not missing:
            return _outcome(task, name, text)
    raise TaskError(f"{task.folder.name}: tests/test.sh ended with status {status} and wrote no reward: {said[-500:]}")


def _outcome(task: Task, name: str, text: str) -> Outcome:
    try:
        value = json.loads(text) if name == "reward.json" else text
        metrics = value if isinstance(value, dict) else {}
        if metrics:
            value = metrics["reward"] if "reward" in metrics else sum(metrics.values()) / len(metrics)
        others = {key: one for key, one in metrics.items() if key != "reward" and isinstance(one, int | float)}
        return Outcome(float(value), others)
    except (ValueError, TypeError, ZeroDivisionError):
        raise TaskError(f"{task.folder.name}: {name} has no number: {text[:200]!r}") from None


class Workspace(ABC):
    """Files and commands of one episode. Paths are those of the task's container."""

    def text(self, text: str) -> str:
        """Return a text of the task, with the paths of this workspace."""
        return text

    @abstractmethod
    async def run(self, command: str, own: Mapping[str, str]) -> tuple[int, str]:
        """Run a shell command in the working directory, with variables `own`. Return its exit status and output.
        Cancelling the call kills the command."""

    @abstractmethod
    async def copy(self, source: Path, target: str) -> None:
        """Copy the contents of a folder to `target`, which exists."""


@asynccontextmanager
async def workspace(task: Task, runtime: str) -> AsyncIterator[Workspace]:
    """Prepare the workspace of a task, and remove it at the end. Raises TaskError, and ValueError: `runtime` cannot be
    used."""
    if runtime == "local":
        with tempfile.TemporaryDirectory(prefix="harbor-", ignore_cleanup_errors=True) as root:
            yield LocalWorkspace(task, Path(root))
        return
    engine = container_engine(runtime)
    image = await _image(engine, task)
    container = f"nrl-lite-harbor-{secrets.token_hex(8)}"
    # A killed agent process does not remove its containers: they end by themselves.
    idle = ["sleep", str(math.ceil(task.limit("agent") + task.limit("verifier") + _SPARE_S))]
    options = ["--detach", "--rm", "--network=host", "--name", container]
    try:
        await _succeeded([engine, "run", *options, image, *idle], f"{task.folder.name}: no container started")
        yield ContainerWorkspace(engine, container, task)
    finally:
        await finished([engine, "rm", "--force", container])


@cache
def container_engine(runtime: str) -> str:
    """Return `docker` or `podman`. Raises ValueError: it does not work on this machine."""
    if runtime not in ("auto", "docker", "podman"):
        raise ValueError(f"agent.kwargs.runtime is auto, docker, podman or local, found {runtime!r}")
    for engine in ("docker", "podman") if runtime == "auto" else (runtime,):
        if shutil.which(engine) and not subprocess.run([engine, "info"], capture_output=True, check=False).returncode:
            return engine
    rule = "no container engine works here: start docker or podman"
    raise ValueError(f"{rule}, or set agent.kwargs.runtime=local, which runs the policy's commands without isolation")


class ContainerWorkspace(Workspace):
    """A running container."""

    def __init__(self, engine: str, container: str, task: Task):
        self._engine, self._container = engine, container
        workdir = task.setting("environment", "workdir", None)
        self._options = () if workdir is None else ("--workdir", workdir)

    async def run(self, command: str, own: Mapping[str, str]) -> tuple[int, str]:
        """See `Workspace.run`."""
        # Values are not in the list of processes.
        given = [word for name in own for word in ("--env", name)]
        words = [self._engine, "exec", *self._options, *given, self._container, "bash", "-c", command]
        try:
            return await finished(words, env={**os.environ, **own})
        except asyncio.CancelledError:
            # The client's end does not end the command. Ending all but `sleep` needs the container's own process ids.
            end = '[ "$(</proc/1/comm)" = sleep ] && kill -KILL -1'
            await finished([self._engine, "exec", self._container, "bash", "-c", end])
            raise

    async def copy(self, source: Path, target: str) -> None:
        """See `Workspace.copy`."""
        words = [self._engine, "cp", f"{source}/.", f"{self._container}:{target}"]
        await _succeeded(words, f"{source} was not copied into the container")


_images: dict[str, asyncio.Future[None]] = {}


async def _image(engine: str, task: Task) -> str:
    if image := task.setting("environment", "docker_image", None):
        return image
    tag = f"nrl-lite-harbor:{await asyncio.to_thread(_digest, task.dockerfile.parent)}"
    # Episodes of a task share one build, which a cancelled episode does not end.
    if tag not in _images:
        _images[tag] = asyncio.ensure_future(_build(engine, task, tag))
    await asyncio.shield(_images[tag])
    return tag


def _digest(folder: Path) -> str:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return hashlib.sha256(b"".join(str(file).encode() + file.read_bytes() for file in files)).hexdigest()[:16]


async def _build(engine: str, task: Task, tag: str) -> None:
    limit = task.setting("environment", "build_timeout_sec", _BUILD_S)
    words = [engine, "build", "--quiet", "--tag", tag, str(task.dockerfile.parent)]
    try:
        await asyncio.wait_for(_succeeded(words, f"{task.folder.name}: the image was not built"), limit)
    except BaseException as error:
        # A later episode tries again.
        del _images[tag]
        if isinstance(error, TimeoutError):
            rule = f"the image's build exceeded environment.build_timeout_sec = {limit}"
            raise TaskError(f"{task.folder.name}: {rule}") from None
        raise


class LocalWorkspace(Workspace):
    """A temporary folder of this machine, without isolation. Of the Dockerfile, only WORKDIR, COPY and ENV apply.

    Commands and texts of the task name the paths of a container, which are replaced by those below the folder.
    """

    def __init__(self, task: Task, root: Path):
        self._root, self._workdir, self._own = root, PurePosixPath("/app"), dict[str, str]()
        mapped = {"logs", "tests", "app"}
        for name, rest in _steps(task.dockerfile):
            match name:
                case "WORKDIR":
                    self._workdir /= self._expanded(rest)
                    mapped.add(_outer(self._workdir))
                case "ENV":
                    self._own |= {name: self._expanded(value) for name, value in _variables(rest)}
                case "COPY" if "--from=" not in rest:
                    *sources, target = map(self._expanded, _copied(rest))
                    self._put(task.dockerfile.parent, sources, target)
                    mapped.add(_outer(self._workdir / target))
        self._workdir = PurePosixPath(task.setting("environment", "workdir", None) or self._workdir)
        mapped.add(_outer(self._workdir))
        names = "|".join(map(re.escape, sorted(mapped - {""})))
        self._paths = re.compile(rf"(?<![\w./~-])/({names})(?![\w.-])")
        self._here(self._workdir).mkdir(parents=True, exist_ok=True)

    def text(self, text: str) -> str:
        """See `Workspace.text`."""
        return self._paths.sub(rf"{self._root}/\1", text)

    async def run(self, command: str, own: Mapping[str, str]) -> tuple[int, str]:
        """See `Workspace.run`."""
        environ = {**_shared(), **{name: self.text(value) for name, value in self._own.items()}, **own}
        words = ["bash", "-c", self.text(command)]
        return await finished(words, env=environ, cwd=self._here(self._workdir))

    async def copy(self, source: Path, target: str) -> None:
        """See `Workspace.copy`. Texts get the paths of this folder."""
        copied = self._here(PurePosixPath(target))
        shutil.copytree(source, copied, dirs_exist_ok=True)
        for file in copied.rglob("*"):
            if file.is_file():
                with suppress(UnicodeDecodeError):
                    file.write_text(self.text(file.read_text()))

    def _expanded(self, value: str) -> str:
        return Template(value).safe_substitute({**_shared(), **self._own})

    def _here(self, path: PurePosixPath) -> Path:
        return self._root / (self._workdir / path).relative_to("/")

    def _put(self, folder: Path, sources: Sequence[str], target: str) -> None:
        place = self._here(PurePosixPath(target))
        # A pattern cannot be ".".
        for source in (found for name in sources for found in sorted(folder.parent.glob(f"{folder.name}/{name}"))):
            if source.is_dir():
                shutil.copytree(source, place, dirs_exist_ok=True)
            else:
                file = place / source.name if target.endswith(("/", ".")) else place
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, file)


def _shared() -> dict[str, str]:
    """Return the variables of this process. Commands of the policy get no keys of the launcher."""
    return {name: value for name, value in os.environ.items() if not re.search("KEY|TOKEN|SECRET", name)}


def _outer(path: PurePosixPath) -> str:
    """Return the outermost folder of a path that programs of this machine do not need, without its first slash."""
    _, *parts = path.parts
    return "/".join(parts if parts[:1] and parts[0] in _SYSTEM else parts[:1])


def _steps(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile, if there is one, with their arguments."""
    text = dockerfile.read_text().replace("\\\n", " ") if dockerfile.is_file() else ""
    for name, _, rest in (line.strip().partition(" ") for line in text.splitlines()):
        if rest.strip():
            yield name.upper(), rest.strip()


def _variables(rest: str) -> list[tuple[str, str]]:
    """Return the variables of `ENV A=1 B=2` or of its older form `ENV A 1`."""
    words = shlex.split(rest)
    if "=" not in words[0]:
        return [(words[0], " ".join(words[1:]))]
    return [(name, value) for name, _, value in (word.partition("=") for word in words)]


def _copied(rest: str) -> list[str]:
    """Return the sources and the target of `COPY a b` or `COPY ["a", "b"]`, without options."""
    rest = re.sub(r"^(--\S+\s+)*", "", rest)
    return json.loads(rest) if rest.startswith("[") else shlex.split(rest)


async def _succeeded(words: Sequence[str], failure: str) -> None:
    """Run a process. Raises TaskError: its exit status is not zero."""
    status, said = await finished(words)
    if status:
        raise TaskError(f"{failure}: {said[-500:]}")
