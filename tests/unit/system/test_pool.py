"""No process of a user's code stops the others' calls, whether it reads, writes, runs or is stopped; none outlives the
launcher."""

import asyncio
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from nemo_rl_lite.system import pool as pool_module
from nemo_rl_lite.system.pool import CallPool, CallTimeout, PoolTarget
from nemo_rl_lite.system.user_errors import CallError

HERE = "tests.unit.system.test_pool"
LARGE = "x" * 400_000


def keep_the_gil() -> None:
    re.fullmatch("(a+)+b", "a" * 60)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    # This thread may run on for a moment.
    time.sleep(60)


def stop_in_a_message() -> None:
    os.write(int(sys.argv[1]), struct.pack("!i", 1000) + b"half")
    stop()


def close_everything() -> None:
    os.closerange(3, 256)
    time.sleep(60)


HANGS = (keep_the_gil, stop, stop_in_a_message, close_everything)


class Code:
    """A user's code, which `do` makes hang in the way that its argument names."""

    def do(self, what: str, row: str = "") -> int:
        if what in globals():
            globals()[what]()
        if what == "keep the GIL later":
            threading.Timer(0.2, keep_the_gil).start()
        return len(row)

    def echo(self, value):
        return value

    def write(self, content: bytes) -> None:
        os.write(int(sys.argv[1]), content)
        time.sleep(60)

    def start_a_child(self) -> int:
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    async def sleep(self, seconds: float, file: str, ignores: bool = False) -> int:
        """Sleep, and write to the file in the end. Returns the process' number."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(600 if ignores else 0.2)
            raise
        finally:
            Path(file).write_text("cleaned up")
        return os.getpid()

    def close(self, session: int) -> None: ...


def make_pool(at_once: int = 8, processes: int = 1, timeout_s: float = 1.0) -> CallPool:
    pool = CallPool(PoolTarget(f"{HERE}.Code", {}, "the process", "timeout_s"), processes, at_once, timeout_s)
    pool.submit("echo", 1).result(60)
    return pool


def outcome(future) -> object:
    try:
        return future.result(30)
    except CallError as error:
        return error


@pytest.mark.parametrize(("hang", "row"), [*((hang, LARGE) for hang in HANGS), (stop, "")])
def test_a_process_that_hangs_costs_its_own_call(hang, row):
    pool = make_pool()
    late = pool.submit("do", hang.__name__, row)
    # Until it hangs; what it takes before is lost with it.
    time.sleep(0.2)
    others = [pool.submit("do", "", row) for _ in range(6)]
    # One that reads no more may also end.
    assert isinstance(outcome(late), CallError if hang is close_everything else CallTimeout)
    assert [outcome(one) for one in others] == [len(row)] * 6


def test_sessions_of_a_process_that_hangs_are_lost_and_named():
    pool = make_pool()
    assert [pool.submit("do", "", session=session).result(30) for session in range(3)] == [0, 0, 0]
    late = pool.submit("do", keep_the_gil.__name__, session=0)
    assert isinstance(outcome(late), CallTimeout)
    pool.close(0)
    # Neither the close nor this is taken.
    lost = [outcome(pool.submit("do", "", LARGE, session=session)) for session in (1, 2)]
    assert str(lost[0]) == "the process took no call within timeout_s = 1"
    assert str(lost[1]) == "the process has ended, and with it what this session had in it"
    assert pool.submit("do", "", session=7).result(30) == 0


def test_a_process_that_hangs_after_its_calls_is_named_and_does_not_hold_the_next_for_ever():
    pool = make_pool()
    assert pool.submit("do", "keep the GIL later").result(30) == 0
    time.sleep(0.4)
    assert str(outcome(pool.submit("do", ""))) == "the process took no call within timeout_s = 1"
    assert pool.submit("do", "").result(30) == 0


def test_a_late_coroutine_is_cancelled_and_its_process_lives(tmp_path):
    pool = make_pool()
    own = pool.submit("sleep", 0, tmp_path / "other").result(30)
    late = pool.submit("sleep", 600, tmp_path / "late")
    assert isinstance(outcome(late), CallTimeout)
    until = time.monotonic() + 5
    while not (tmp_path / "late").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert pool.submit("sleep", 0, tmp_path / "other").result(30) == own


def test_a_coroutine_that_ignores_its_cancellation_delays_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "CANCEL_S", 0.5)
    pool = make_pool()
    own = pool.submit("sleep", 0, tmp_path / "other").result(30)
    late = pool.submit("sleep", 600, tmp_path / "late", True)
    assert isinstance(outcome(late), CallTimeout)
    assert pool.submit("sleep", 0, tmp_path / "other").result(30) != own
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("written", [b"no pickle", pickle.dumps(5), pickle.dumps((1, 2, 3))])
def test_a_process_whose_code_writes_to_its_pipe_is_ended(written):
    pool = make_pool(timeout_s=30)
    assert isinstance(outcome(pool.submit("write", struct.pack("!i", len(written)) + written)), CallError)
    assert pool.submit("echo", 1).result(30) == 1


@pytest.mark.parametrize("at_once", [1, 8])
def test_messages_of_any_size_arrive_as_they_were(at_once):
    pool = make_pool(at_once, timeout_s=30)
    values = [b"", b"\x00\xff" * 3, os.urandom(3_000_000), {"a": [1, "é"]}, None, "x" * 70_000]
    assert [future.result(30) for future in [pool.submit("echo", value) for value in values]] == values
    with pytest.raises(CallError, match="pickle"):
        pool.submit("echo", lambda: None).result(30)
    assert pool.submit("echo", 1).result(30) == 1


def test_many_calls_run_at_a_time_and_are_given_out_fast():
    pool = make_pool(at_once=64, processes=2, timeout_s=60)
    began = time.perf_counter()
    futures = [pool.submit("echo", number) for number in range(3000)]
    assert [future.result(60) for future in futures] == list(range(3000))
    assert time.perf_counter() - began < 60


LAUNCHER = f"""
import os, signal, sys
from {HERE} import make_pool
pool = make_pool(at_once=4, timeout_s=600)
print(pool.submit("start_a_child").result(60), flush=True)
pool.submit("do", sys.argv[1])
if sys.argv[1]:
    pool.submit("do", "", "x" * 1_000_000)
signal.pause()
"""


@pytest.mark.parametrize("busy", ["", "keep_the_gil", "stop"])
def test_no_process_is_left_after_a_launcher_that_was_killed(busy):
    command = [sys.executable, "-c", LAUNCHER, busy]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        child = psutil.Process(int(launcher.stdout.readline()))
        left = [child, *psutil.Process(launcher.pid).children(recursive=True)]
        launcher.kill()
    _, alive = psutil.wait_procs(left, timeout=20)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("module", ["rewards.judge", "environments.registry", "environments.agents"])
def test_processes_start_without_the_schema(module):
    """Its classes take three times as long as the rest."""
    code = f"import sys, nemo_rl_lite.{module}; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
