"""Ray actor that hosts an instance of a plain class, given by its dotted path."""

import gc
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from nemo_rl_lite.cluster.heartbeat import HeartbeatThread
from nemo_rl_lite.compat.imports import quick_imports
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.observability import profiling
from nemo_rl_lite.observability.timer import SETUP, seconds_since_start
from nemo_rl_lite.system.machine import free_port, log_to_stderr

# Environment of every worker: no Hub access, no tokenizer threads, unbuffered output of child processes.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}

# The whole constructor, which contains all other parts of the start-up except the import.
BUILD = "build"


@contextmanager
def errors_that_travel() -> Iterator[None]:
    """Replace an error that cannot be pickled by one with the same text, which Ray would drop."""
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 (made here)
        except Exception:  # a library's error may fail in any way
            raise RuntimeError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        raise


class WorkerProcess:
    """A process for one worker. Its output goes to `log_file`; `worker` is its name in heartbeats.

    `environment` is set before other imports. Ray's runtime environments would start another process first."""

    def __init__(self, worker: str, log_file: str, environment: dict[str, str]):
        SETUP.add("process", seconds_since_start())
        os.environ.update(ENVIRONMENT | environment)
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log_file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
        sys.stdout.write(f"process {os.getpid()} on {ray.util.get_node_ip_address()}\n")
        self._heartbeat = HeartbeatThread(worker, self.gpus())
        self._class: Any = None
        self._worker: Any = None

    def free_port(self) -> tuple[str, int]:
        """Return the address of this node and a free port."""
        return ray.util.get_node_ip_address(), free_port()

    def gpus(self) -> list[str]:
        """Return the GPUs that Ray has assigned to this process, as in CUDA_VISIBLE_DEVICES."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def load(self, class_path: str, environment: dict[str, str], runner_path: str = "") -> None:
        """Set the environment and import the class, so that `start` is quick. With a runner, `start` passes it a
        function that constructs the worker. The module may have `preload`, which imports more, and `beat` (see
        `HeartbeatThread`)."""
        log_to_stderr()
        os.environ.update(environment)
        module_name, _, class_name = class_path.rpartition(".")
        with self._heartbeat.during("import", None), SETUP("import"), quick_imports():
            module = importlib.import_module(module_name)
            if hasattr(module, "preload"):
                module.preload()
            self._class = getattr(module, class_name)
            self._heartbeat.beat = getattr(module, "beat", None)
            if runner_path:
                runner, kind = imported(runner_path), self._class
                self._class = lambda **arguments: runner(partial(kind, **arguments))
        # A later garbage collection would walk through all that was imported, for half a second.
        gc.freeze()

    def start(self, arguments: dict[str, Any]) -> dict[str, float]:
        """Construct the loaded worker; return seconds by part of the start-up. `build` is the whole constructor."""
        with self._heartbeat.during("start", None), SETUP(BUILD), errors_that_travel():
            self._worker = self._class(**arguments)
        return SETUP.take()

    def call(self, method: str, phase: str, limit_s: float | None, *arguments: Any) -> Any:
        """Call a method of the worker. After `limit_s` seconds, write the stacks to the log."""
        with self._heartbeat.during(phase, limit_s), profiling.span(phase), errors_that_travel():
            return getattr(self._worker, method)(*arguments)

    def close(self) -> None:
        """Close the worker after the loss of another, so that this process can build the next one. Raises RuntimeError:
        there is none, because the loss was during its construction."""
        with self._heartbeat.during("close", None), errors_that_travel():
            self._heartbeat.end_request()
            worker, self._worker = self._worker, None
            if worker is None:
                raise RuntimeError("the worker was not complete")
            worker.close(is_rank_lost=True)

    def is_there(self) -> bool:
        return True

    def begin_profile(self, tool: profiling.Tool) -> None:
        """Start a trace of this process."""
        self._in_workers_thread(partial(profiling.begin, tool))

    def end_profile(self, file: str) -> None:
        """Write the trace."""
        self._in_workers_thread(partial(profiling.end, Path(file)))

    def _in_workers_thread(self, work: Callable[[], None]) -> None:
        # torch records the thread that starts the profiler.
        getattr(self._worker, "run_in_thread", lambda own: own())(work)

    def peak_memory(self) -> int:
        """Return this process's peak resident memory in bytes."""
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
WorkerActor = ray.remote(**_OPTIONS)(WorkerProcess)


class ListenedProcess(WorkerProcess):
    """A process whose worker has its own thread. It takes further calls, which wait for results."""

    @ray.method(concurrency_group="beside")
    def wait_for_part(self, part: str) -> None:
        """Wait until the starting worker has ended this part of its start-up, or the whole."""
        SETUP.wait_for(part, BUILD)

    @ray.method(concurrency_group="beside")
    def call_beside(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker concurrently with another call."""
        with errors_that_travel():
            return getattr(self._worker, method)(*arguments)


ListenedActor = ray.remote(**_OPTIONS | {"concurrency_groups": {"beside": 2}})(ListenedProcess)
