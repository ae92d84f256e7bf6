"""What the launcher itself does has limits, too."""

import subprocess
import sys
import time

import psutil
import pytest

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.observability.liveness import exceeded, limited, progressed, watched


def never(error: WorkerError) -> None:
    raise AssertionError("the main thread reacts")


def sleep_long() -> None:
    time.sleep(60)


def test_what_takes_too_long_is_named_with_the_line_that_it_is_at():
    started = time.monotonic()
    outer, inner = limited("the launcher's own work", 600), limited("a nap", 0.2)
    with pytest.raises(WorkerError) as raised, watched(never), outer, inner:
        sleep_long()
    assert time.monotonic() - started < 30
    assert str(raised.value).startswith(
        "worker error: launcher failed in phase 'a nap': not done within 0.2 s; it is at "
    )
    assert raised.value.details.count("sleep_long") >= 1 and not raised.value.lost


def test_only_the_innermost_counts_and_the_one_around_it_starts_again():
    with limited("outer", 0.2):
        with limited("inner", None):
            time.sleep(0.3)
            assert exceeded() is None
        assert exceeded() is None
        time.sleep(0.3)
        assert exceeded().what == "outer"
        progressed()
        assert exceeded() is None
    assert exceeded() is None


START = """
import signal, subprocess, time
from nemo_rl_lite.observability import liveness
from nemo_rl_lite.observability.liveness import limited
liveness.GRACE_S = 0.5
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
def hang():
    HANG
with liveness.watched(lambda error: print(error, flush=True)), limited("a test", 0.2):
    hang()
"""


def hang(line: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", START.replace("HANG", line)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_main_thread_that_does_not_react_is_ended_with_what_it_has_started():
    done = hang("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}); time.sleep(100)")
    assert done.returncode == 3, done.stderr
    pid, said = done.stdout.splitlines()
    assert "launcher failed in phase 'a test'" in said
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_step_of_c_code_that_keeps_python_from_running_ends_too():
    done = hang("7**7**9")
    psutil.Process(int(done.stdout)).kill()
    assert done.returncode == 1 and "in hang" in done.stderr
