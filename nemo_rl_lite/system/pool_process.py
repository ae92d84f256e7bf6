"""A process of a `CallPool`: `pool.py` starts `python -m nemo_rl_lite.system.pool_process PIPE`."""

import asyncio
import ctypes
import importlib
import inspect
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil

from nemo_rl_lite.system.pool import as_call_error

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36


def main() -> None:
    """Answer calls until the pipe is closed, as by the launcher's end; then end all that the code has started."""
    # No other process of this user reads its keys or its memory. Programs that it starts are others.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # What the code's children leave behind becomes a child of this process.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    with suppress(EOFError, OSError):
        sys.path[:], path, arguments, at_once = pipe.recv()
        module_name, _, name = path.rpartition(".")
        target = getattr(importlib.import_module(module_name), name)(**arguments)
        pipe.send(None)
        if at_once == 1:
            _one_by_one(pipe, target)
        else:
            asyncio.run(_many(pipe, target, at_once))
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    # sys.exit would wait for threads with late calls.
    os._exit(0)


def _one_by_one(pipe: Connection, target: Any) -> None:
    """Answer each call before the next, in the main thread, which some code needs (signals)."""
    with asyncio.Runner() as runner:
        while True:
            number, method, arguments = pipe.recv()
            _send(pipe, number, _outcome(partial(_finished, runner, getattr(target, method), arguments)))


def _finished(runner: asyncio.Runner, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Plain code may return a coroutine, such as a decorated `async def`."""
    value = call(*arguments)
    return runner.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _send(pipe: Connection, number: int | None, value: Any) -> None:
    """Send a call's result, or the error if it cannot be pickled; nothing if nobody waits (None)."""
    if number is None:
        return
    try:
        content = pickle.dumps(value)
    except Exception as error:  # a user's object may raise anything
        content = pickle.dumps(as_call_error(error))
    pipe.send((number, content))


async def _many(pipe: Connection, target: Any, at_once: int) -> None:
    """Answer calls as they come: coroutines in this thread, plain code in others."""
    loop, threads, sending = asyncio.get_running_loop(), ThreadPoolExecutor(at_once), threading.Lock()
    ended = loop.create_future()

    def send(number: int | None, value: Any) -> None:
        with suppress(OSError), sending:
            _send(pipe, number, value)

    def receive() -> None:
        with suppress(EOFError, OSError, RuntimeError):
            while True:
                loop.call_soon_threadsafe(begin, *pipe.recv())
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set_result, None)

    def begin(number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        call = getattr(target, method)
        if inspect.iscoroutinefunction(call):
            tasks.add(task := asyncio.create_task(awaited(number, call, arguments)))
            task.add_done_callback(tasks.discard)
        else:
            threads.submit(run, number, call, arguments)

    def run(number: int | None, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        with asyncio.Runner() as runner:
            send(number, _outcome(partial(_finished, runner, call, arguments)))

    async def awaited(number: int | None, call: Any, arguments: tuple[Any, ...]) -> None:
        try:
            value = await call(*arguments)
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            value = as_call_error(error)
        send(number, value)

    tasks: set[asyncio.Task] = set()
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
