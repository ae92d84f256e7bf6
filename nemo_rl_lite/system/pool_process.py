"""Process of a `CallPool`, started by `pool.py` as `python -m nemo_rl_lite.system.pool_process PIPE`."""

import asyncio
import ctypes
import importlib
import inspect
import os
import pickle
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

from nemo_rl_lite.system.pool import kill_descendants
from nemo_rl_lite.system.user_errors import as_call_error

# Message that acknowledges the next message, except for cancellations; the first one is the target.
_TAKEN = None
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
# Seconds for an idle process to end by itself.
_END_S = 1.0


def main() -> None:
    """Answer calls in a child until the pipe is closed, for example because the launcher ends. The guard, its parent,
    then kills everything that the code has started."""
    pipe, libc, guard = Connection(int(sys.argv[1])), ctypes.CDLL(None), os.getpid()
    launcher = os.pidfd_open(os.getppid())
    os.set_inheritable(pipe.fileno(), False)
    # Prevent other processes of this user from reading its keys and memory.
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if worker := os.fork():
        pipe.close()
        _guard(worker, launcher)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # Adopt orphans of the code's children.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.close(launcher)
    with suppress(EOFError, OSError):
        if os.getppid() == guard:
            _answer(pipe)
    # sys.exit would wait for threads with late calls.
    os._exit(0)


def _guard(worker: int, launcher: int) -> NoReturn:
    """Wait for the end of the worker or the launcher, kill the remaining processes, and exit like the worker."""
    news, ended = select.poll(), select.poll()
    watched = os.pidfd_open(worker)
    ended.register(watched, select.POLLIN)
    for one in (watched, launcher):
        news.register(one, select.POLLIN)
    news.poll()
    if not ended.poll(_END_S * 1000):
        os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    kill_descendants(psutil.Process())
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # some signals have no handlers
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _answer(pipe: Connection) -> None:
    sys.path[:], path, arguments, at_once = pipe.recv()
    module_name, _, name = path.rpartition(".")
    target = getattr(importlib.import_module(module_name), name)(**arguments)
    pipe.send(_TAKEN)
    if at_once == 1:
        _one_by_one(pipe, target)
    else:
        asyncio.run(_many(pipe, target, at_once))


def _one_by_one(pipe: Connection, target: Any) -> None:
    """Answer calls sequentially in the main thread, which signal handlers need."""
    with asyncio.Runner() as runner:
        while True:
            number, method, arguments = pipe.recv()
            pipe.send(_TAKEN)
            _send(pipe, number, _outcome(partial(_finished, runner, getattr(target, method), arguments)))


def _finished(runner: asyncio.Runner, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call plain code, which may return a coroutine."""
    value = call(*arguments)
    return runner.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _send(pipe: Connection, number: int | None, value: Any) -> None:
    """Send a call's result, or the error of pickling it; nothing if the number is None."""
    if number is None:
        return
    try:
        content = pickle.dumps(value)
    except Exception as error:  # a user's object may raise anything
        content = pickle.dumps(as_call_error(error))
    pipe.send((number, content))


async def _many(pipe: Connection, target: Any, at_once: int) -> None:
    """Answer calls concurrently: coroutines in this thread, plain code in others."""
    loop, threads, sending = asyncio.get_running_loop(), ThreadPoolExecutor(at_once), threading.Lock()
    ended = loop.create_future()

    def send(number: int | None, value: Any) -> None:
        with suppress(OSError), sending:
            _send(pipe, number, value)

    def receive() -> None:
        with suppress(EOFError, OSError, RuntimeError):
            while True:
                number, method, arguments = pipe.recv()
                if method is None:
                    loop.call_soon_threadsafe(cancel, number)
                    continue
                with sending:
                    pipe.send(_TAKEN)
                loop.call_soon_threadsafe(begin, number, method, arguments)
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set_result, None)

    def begin(number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        call = getattr(target, method)
        if inspect.iscoroutinefunction(call):
            task = asyncio.create_task(awaited(number, call, arguments))
            tasks[task] = number
            task.add_done_callback(tasks.pop)
        else:
            threads.submit(run, number, call, arguments)

    def cancel(number: int) -> None:
        """Cancel a coroutine, or tell the pool that there is none."""
        found = [task for task, own in tasks.items() if own == number]
        for task in found:
            task.cancel()
        if not found:
            with suppress(OSError), sending:
                pipe.send((number, None))

    def run(number: int | None, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        with asyncio.Runner() as runner:
            send(number, _outcome(partial(_finished, runner, call, arguments)))

    async def awaited(number: int | None, call: Any, arguments: tuple[Any, ...]) -> None:
        try:
            value = await call(*arguments)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # a user's code may raise anything
            value = as_call_error(error)
        send(number, value)

    tasks: dict[asyncio.Task, int | None] = {}
    threading.Thread(target=receive, daemon=True).start()
    await ended


def _outcome(call: Callable[[], Any]) -> Any:
    own = os.getpid()
    try:
        value = call()
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        value = as_call_error(error)
    if os.getpid() != own:
        # The code has forked, and this is the copy.
        os._exit(0)
    return value


if __name__ == "__main__":
    main()
