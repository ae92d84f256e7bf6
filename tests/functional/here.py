"""Whole runs of the command in this process: everything but Ray and the workers' processes is the real thing.

A worker is a plain class, so a thread can call its methods as an actor does.
"""

import copy
import gc
import importlib
import io
import json
import logging
import os
import pickle
import resource
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from multiprocessing import Pipe, forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import psutil
import pytest
from ray.exceptions import RayTaskError

from nemo_rl_lite.cluster import calls, heartbeat
from nemo_rl_lite.cluster.calls import Call
from nemo_rl_lite.cluster.heartbeat import Heartbeat
from nemo_rl_lite.cluster.limits import PhaseLimits
from nemo_rl_lite.compat.imports import quick_imports
from nemo_rl_lite.observability.system import System, Usage
from nemo_rl_lite.observability.timer import SETUP
from nemo_rl_lite.run import run as run_module
from nemo_rl_lite.run.command import launch
from nemo_rl_lite.system import stopping
from nemo_rl_lite.system.machine import free_port
from nemo_rl_lite.workers import reserve as reserve_module
from tests.functional.embedded import of_run
from tests.functional.ranks import preloaded


@cache
def import_class(path: str) -> Any:
    """The worker class, with everything that it will need."""
    module_name, _, class_name = path.rpartition(".")
    wandb = sys.modules.get("wandb")
    # megatron-bridge logs for ever to what is the standard error now, and pytest's ends with the test.
    with redirect_stderr(sys.__stderr__), quick_imports():
        module = importlib.import_module(module_name)
        getattr(module, "preload", lambda: None)()
    # A policy's process goes without it, the launcher's does not.
    sys.modules.pop("wandb", None)
    if wandb is not None:
        sys.modules["wandb"] = wandb
    return getattr(module, class_name)


@cache
def import_policy() -> None:
    """Import what policies need. Freeze it, because a run collects garbage several times."""
    import_class(reserve_module.POLICY_CLASS)
    gc.collect()
    gc.freeze()


class Worker:
    """One worker of this process; what it logs goes to its log file."""

    def __init__(self) -> None:
        self._class: Any = None
        self._worker: Any = None

    def load(self, class_path: str, environment: dict[str, str], runner_path: str = "") -> None:
        os.environ.update(environment)
        with _importing:
            self._class = kind = import_class(class_path)
            if runner_path:
                runner = import_class(runner_path)
                self._class = lambda **arguments: runner(partial(kind, **arguments))

    def start(self, arguments: dict[str, Any]) -> dict[str, float]:
        self._worker = self._class(**arguments)
        model = getattr(self._worker, "_model", None)
        _models.update(getattr(model, "chunks", [] if model is None else [model]))
        return SETUP.take()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)

    def close(self) -> None:
        """Close the worker. One that was not built to its end may have left its groups."""
        worker, self._worker = self._worker, None
        if hasattr(worker, "close"):
            worker.close()
        elif worker is None and "megatron.core" in sys.modules:
            from torch import distributed

            from nemo_rl_lite.policy.groups import leave_groups

            if distributed.is_initialized():
                leave_groups()


class Elsewhere:
    """A worker of another process, which serves it (see `serve`)."""

    def __init__(self, connection: Connection):
        self._connection, self._one_by_one = connection, Lock()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._ask(name, *arguments)

    def _ask(self, *request: Any) -> Any:
        with self._one_by_one:
            self._connection.send_bytes(pickle.dumps(request))
            answer, error = pickle.loads(self._connection.recv_bytes())
        if error is not None:
            raise error
        return answer


def serve(connection: Connection, environment: Mapping[str, str] | None = None) -> None:
    """Do what an `Elsewhere` at the other end asks for, until that is closed."""
    os.environ.update(environment or {})
    worker = Worker()
    while True:
        try:
            name, *arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer, error = getattr(worker, name)(*arguments), None
        except Exception as raised:
            traceback.print_exc()
            answer, error = None, raised
        connection.send_bytes(pickle.dumps((answer, error)))


def connection_to_a_new_process(environment: Mapping[str, str]) -> Connection:
    """A process that serves a worker until this end of the connection is closed; it has imported megatron-core and
    vLLM."""
    here, there = Pipe()
    context = preloaded()
    context.Process(target=serve, args=(there, dict(environment)), daemon=True).start()
    there.close()
    return here


class GroupHere:
    """`WorkerGroup` whose first worker is in this process, and others in processes that serve them."""

    peers: Mapping[str, Sequence[Connection]] = {}
    """By the name of a group."""
    elsewhere: Sequence[str] = ("teacher",)
    """Groups whose workers are in new processes, because a process has one group of torch.distributed's ranks."""

    def __init__(
        self,
        name: str,
        slots: Sequence[Any],
        log_folder: str,
        environment: dict[str, str],
        slots_each: int = 1,
        hosts_each: int = 1,
        limit_s: float | None = None,
        is_listened: bool = False,
    ):
        self.name, self._limit_s, self.limits = name, limit_s, PhaseLimits(limit_s)
        self.processes = [f"{name} rank {rank}" for rank in range(len(slots))]
        others = [Elsewhere(connection) for connection in self.peers.get(name, ())[: len(slots) - 1]]
        if name in self.elsewhere:
            self.workers = [Elsewhere(connection_to_a_new_process(environment)) for _ in slots]
        else:
            self.workers = [Worker(), *others]
        assert len(self.workers) == len(slots), f"there are no processes for {len(slots)} ranks"
        self._starting: list[Future] = []
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=worker) for worker in self.processes]
        self._beside = [ThreadPoolExecutor(1, thread_name_prefix=worker) for worker in self.processes]
        os.environ.update(environment)
        Path(log_folder).mkdir(parents=True, exist_ok=True)
        self._log = logging.FileHandler(Path(log_folder) / f"{name}-0.log")
        self._log.addFilter(self._is_ours)
        for handler in logging.getLogger().handlers:
            handler.addFilter(lambda record: not self._is_ours(record))
        logging.getLogger().addHandler(self._log)
        _groups.append(self)

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def ranks(self) -> list[int]:
        return list(range(len(self)))

    def part(self, places: Sequence[int]) -> "GroupHere":
        part = copy.copy(self)
        for name in ("processes", "workers", "_threads", "_beside"):
            setattr(part, name, [getattr(self, name)[place] for place in places])
        return part

    def load(
        self, class_path: str, environments: Sequence[dict[str, str]], follower_path: str = "", runner_path: str = ""
    ) -> Call:
        # Two threads that import transformers at once can leave it half-imported.
        if isinstance(self.workers[0], Worker):
            import_class(class_path)
        return self._each("load", [(class_path, own, runner_path) for own in environments], "start")

    def start(self, arguments: Sequence[dict[str, Any]]) -> Call:
        # Not while the launcher, in this process too, reads its data.
        _awaited.clear()
        for thread in self._threads:
            thread.submit(_awaited.wait)
        begun = self._each("start", [(own,) for own in arguments], "start")
        self._starting += begun.references
        return begun

    def gpus(self, timeout_s: float) -> list[list[str]]:
        return [[] for _ in self.workers]

    def put(self, value: Any) -> Any:
        return value

    def call(self, method: str, *arguments: Any, phase: str = "") -> Call:
        return self.call_each(method, [arguments] * len(self), phase)

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]], phase: str = "") -> Call:
        return self._each("call", [(method, *own) for own in arguments], phase or method, self._limit_s)

    def call_one(self, place: int, methods: Sequence[tuple[str, tuple[Any, ...]]], phase: str) -> Call:
        thread, worker = self._threads[place], self.workers[place]
        futures = tuple(_as_reference(thread.submit(worker.call, method, *own)) for method, own in methods)
        return Call((self.processes[place],) * len(futures), phase, futures, self._limit_s)

    def call_beside(self, place: int, method: str, *arguments: Any, phase: str) -> Call:
        future = _as_reference(self._beside[place].submit(self.workers[place].call, method, *arguments))
        return Call((self.processes[place],), phase, (future,), self._limit_s)

    def addresses(self, timeout_s: float) -> list[tuple[str, int]]:
        return [("127.0.0.1", free_port()) for _ in self.workers]

    def peak_memory(self) -> list[int]:
        return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024] * len(self)

    def cancel(self) -> None:
        """Start nothing any more that no one has waited for: a real process would be killed."""
        for one in self._starting:
            one.cancel()

    def close(self) -> None:
        calls.wait(self._each("close", [()] * len(self), "end"))
        for thread in [*self._threads, *self._beside]:
            thread.shutdown()
        logging.getLogger().removeHandler(self._log)
        self._log.close()

    def _is_ours(self, record: logging.LogRecord) -> bool:
        own = "engine" if self.name == "generation" else self.processes[0]
        return record.threadName.startswith((own, self.processes[0]))

    def _each(self, what: str, arguments: Sequence[Sequence[Any]], phase: str, limit_s: float | None = None) -> Call:
        asked = zip(self._threads, self.workers, arguments, strict=True)
        futures = tuple(thread.submit(getattr(worker, what), *own) for thread, worker, own in asked)
        return Call(tuple(self.processes), phase, futures, limit_s)


def _as_reference(future: Future) -> Any:
    """Give the future what an object reference of Ray has."""
    future.future = lambda: future
    return future


_groups: list[GroupHere] = []
_importing, _awaited = Lock(), Event()


def _wait(futures: Sequence[Future], num_returns: int, timeout: float | None) -> tuple[list[Future], list[Future]]:
    _awaited.set()
    done, pending = wait_for(futures, timeout, FIRST_COMPLETED)
    return list(done), list(pending)


def _get(future: Future) -> Any:
    try:
        return future.result()
    except Exception as error:
        raise RayTaskError("call", traceback.format_exc(), error, pid=os.getpid(), ip="127.0.0.1") from None


class Heartbeats:
    """`last_heartbeats` of workers that are here: each has just taken a sample of this machine."""

    def __init__(self) -> None:
        self._usage = Usage()

    def __call__(self, names: Sequence[str]) -> list[Heartbeat]:
        self._usage, now = self._usage.plus(System(()).sample()), time.time()
        return [Heartbeat(name, "idle", now, now, node="here", usage=self._usage) for name in names]


_models: WeakSet[Any] = WeakSet()
"""The models that runs of this process have built."""


def belongings() -> Counter[str]:
    """What this process has of that which a run may not leave behind: models, threads, sockets, and child processes."""
    found = Counter(f"model {type(one).__name__}" for one in _models)
    found.update(f"thread {one.name}" for one in threading.enumerate() if one.name != "tqdm_monitor")
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with suppress(OSError):
            name = (task / "comm").read_text().strip()
            found.update([name] if name.startswith("pt_") else [])
    found.update("socket" for one in Path("/proc/self/fd").iterdir() if "socket:" in os.path.realpath(one))
    # multiprocessing's own end with this process.
    lasting = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in lasting]
    return found + Counter(f"process {child.pid}" for child in children if _runs(child))


def _runs(child: psutil.Process) -> bool:
    """Return whether a process has not ended. On busy cores a pool may stop waiting for a killed process."""
    with suppress(psutil.Error):
        return child.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Fail where the block leaves anything in this process that it did not find there."""
    before = belongings()
    yield
    for wait_s in (0, 0.2, 1, 3, 10):
        # What was told to end may take a while on busy cores.
        time.sleep(wait_s)
        left = belongings() - before
        if not left:
            return
        gc.collect()
    raise AssertionError(f"a run has left behind: {dict(left)}")


@contextmanager
def without_ray(elsewhere: Sequence[str] = ()) -> Iterator[None]:
    """Run a run's workers in this process within the block, except for the groups `elsewhere`. Restore environment and
    logging at its end."""
    import_policy()
    root, environ = logging.getLogger(), dict(os.environ)
    handlers, level, argv = root.handlers[:], root.level, sys.argv
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ends:
        ends.callback(setattr, sys, "argv", argv)
        ends.callback(root.setLevel, level)
        ends.callback(setattr, root, "handlers", handlers)
        ends.callback(lambda: (os.environ.clear(), os.environ.update(environ)))
        ends.callback(lambda: [_groups.pop().close() for _ in _groups[:]])
        ends.callback(lambda: [group.cancel() for group in _groups])
        # A test's process may be one of several ranks; the command must not look like one of several copies.
        for name in ("RAY_ADDRESS", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        patch.setattr(run_module, "ray_runtime", nullcontext)
        patch.setattr(run_module, "lost_process", str)
        patch.setattr(reserve_module, "WorkerGroup", GroupHere)
        patch.setattr(GroupHere, "elsewhere", (*GroupHere.elsewhere, *elsewhere))
        patch.setattr(calls, "ray", SimpleNamespace(wait=_wait, get=_get))
        # Signals of one run are not those of the next.
        patch.setattr(stopping, "_received", [])
        patch.setattr(heartbeat, "last_heartbeats", Heartbeats())
        yield


def run_here(folder: Path, model: Path, *overrides: str, elsewhere: Sequence[str] = ()) -> CompletedProcess:
    """What `conftest.run_command` would do: exit status, standard output, standard error. Workers of the groups
    `elsewhere` are in processes of their own, as those of vLLM must be."""
    command = [*of_run(folder, model), *overrides]
    output, errors, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(output), redirect_stderr(errors), leaving_nothing(), without_ray(elsewhere):
        try:
            launch(command)
        except SystemExit as end:
            status = end.code
    return CompletedProcess(command, status, output.getvalue(), errors.getvalue())


def train_here(
    folder: Path, model: Path, *overrides: str, plots: bool = False, elsewhere: Sequence[str] = ()
) -> tuple[str, list[dict]]:
    """What `conftest.train` would do: the console's text and the metrics, line by line."""
    done = run_here(folder, model, f"logger.plots={str(plots).lower()}", *overrides, elsewhere=elsewhere)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
