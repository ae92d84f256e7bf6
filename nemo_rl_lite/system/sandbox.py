"""Run untrusted Python code in a separate process.

If the kernel allows it, the process has its own namespaces: no other processes, no network, no writable files. Time,
memory, processes, files and output are always limited. The code can read the files of this user. Against attackers, use
a container or a virtual machine.
"""

import itertools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_rl_lite.system.machine import MIB

_CHILD = Path(__file__).with_name("sandbox_child.py")
# Extra seconds for the child to start and to report.
_GRACE_S = 2.0
_REMOVE_S = 1.0
_LONGEST_REPORT = 4096
# Numeric libraries would start one thread per core.
_ENVIRONMENT = {"PATH": os.defpath, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_MARK = "NRL_SANDBOX"
OPEN = "programs reach the network, read this user's processes and may leave files and processes"
"""Consequence of missing namespaces."""
ALLOW = "allow user namespaces (sysctl user.max_user_namespaces; in Docker --security-opt seccomp=unconfined)"
_KILLS = 100


@dataclass(frozen=True)
class Limits:
    """Limits of a program. `seconds`: wall-clock and processor time; `memory_mib`: address space of each process, and
    total memory; `processes`: processes and threads; `output`: kept bytes."""

    seconds: float = 10.0
    memory_mib: int = 1024
    output: int = 10_000
    processes: int = 128


@dataclass(frozen=True)
class Ran:
    """Result of a program: exit status (None: it exceeded the `limit` time, memory or processes), output, and isolation
    that the kernel `refused`."""

    status: int | None
    output: str
    limit: str = ""
    refused: str = ""

    def excess(self, limits: Limits) -> str:
        """Describe the exceeded limit."""
        return {
            "time": f"took longer than {limits.seconds:g} s",
            "memory": f"used more than {limits.memory_mib} MiB of memory in all its processes",
            "processes": f"had more than {limits.processes} processes and threads",
        }[self.limit]


def run_python(code: str, stdin: str = "", limits: Limits | None = None, errors: bool = True) -> Ran:
    """Run the code as a script in a temporary folder. `errors`: include standard error in the output. Raises OSError:
    the sandbox cannot run on this machine. Errors of the code are in the result."""
    return _run(code, stdin, limits or Limits(), errors)[0]


def passes(code: str, tests: str, limits: Limits, apart: bool = True) -> bool:
    """Run the code, and then tests that use its names. Return whether the tests reach their last line.

    `apart`: the tests run in another process and exchange only values and calls with the code (`sandbox_values.py`).
    Otherwise they run in the code's process, for tests that need its objects. Raises what `run_python` raises.
    """
    word = secrets.token_hex(16)
    return _run(code, "", limits, True, f"{word}\n{tests}", "apart" if apart else "together")[1] == word


def _run(code: str, stdin: str, limits: Limits, errors: bool, tests: str = "", way: str = "") -> tuple[Ran, str]:
    """Run the code, with tests if `way` is given. Return also the word that proves that the tests passed."""
    with _folder() as folder, ExitStack() as files:
        given, tested, written = (files.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(3))
        for file, text in ((given, stdin), (tested, tests)):
            file.write(text.encode(errors="surrogatepass"))
            file.seek(0)
        box = folder / "box"
        asked = {"code": code, "box": str(box), "memory": limits.memory_mib * MIB, "tests": way, **asdict(limits)}
        (told, tell), (said, says) = os.pipe(), os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD), str(told), str(tested.fileno()), str(says)],
            stdin=given,
            stdout=written,
            stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
            cwd=box,
            env=_ENVIRONMENT | {"HOME": str(box), _MARK: folder.name},
            pass_fds=[told, tested.fileno(), says],
            start_new_session=True,
        )
        os.close(told)
        os.close(says)
        with suppress(OSError), os.fdopen(tell, "w") as file:
            file.write(json.dumps(asked))
        report = _report(said, limits.seconds + _GRACE_S)
        process.kill()
        process.wait()
        if not report:
            _kill_marked(folder.name)
        # Read by descriptor, because the code may have replaced the file's name.
        output = os.pread(written.fileno(), limits.output, 0).decode(errors="replace")
    if process.returncode > 0:
        # Only the supervisor itself exits with a positive status.
        raise OSError(f"the sandbox did not start: {output.strip().rpartition(chr(10))[2]}")
    status, limit = report.get("status"), report.get("limit", "time")
    if status == -signal.SIGXCPU:
        # The limit on processor time was exceeded first.
        status, limit = None, "time"
    return Ran(status, output, limit, report.get("refused", "")), report.get("word", "")


@cache
def refused() -> str:
    """Return the isolation that this machine's kernel refuses; "" if programs are isolated."""
    return run_python("").refused


def _report(said: int, seconds: float) -> dict[str, Any]:
    """Return the child's report; empty if there is none in time."""
    late, text = time.monotonic() + seconds, b""
    with os.fdopen(said, "rb", buffering=0) as file:
        while select.select([file], [], [], max(late - time.monotonic(), 0))[0] and (
            read := file.read(_LONGEST_REPORT)
        ):
            text += read
    return json.loads(text) if text else {}


def _kill_marked(name: str) -> None:
    """Kill the processes of a program that has killed or stopped its supervisor."""
    mark = f"{_MARK}={name}".encode()
    for _ in range(_KILLS):
        found = [one for one in Path("/proc").glob("[0-9]*") if mark in _environment(one)]
        for one in found:
            with suppress(OSError):
                os.kill(int(one.name), signal.SIGKILL)
        if not found:
            return


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@contextmanager
def _folder() -> Iterator[Path]:
    """Create a folder with a subfolder `box`, and remove it afterwards with its content."""
    folder = Path(tempfile.mkdtemp(prefix="nrl-sandbox-"))
    try:
        (folder / "box").mkdir()
        yield folder
    finally:
        try:
            (folder / "box").rmdir()
            folder.rmdir()
        except OSError:
            # Removing thousands of files may take minutes, so continue in a thread.
            removal = threading.Thread(target=_remove, args=(folder,), daemon=True)
            removal.start()
            removal.join(_REMOVE_S)


def _remove(folder: Path) -> None:
    """Remove a folder of any depth, for which `shutil.rmtree` would recurse, also without permissions."""
    with suppress(OSError):
        folder.chmod(0o700)
        _empty(folder)
        folder.rmdir()


def _empty(folder: Path) -> None:
    names = (folder / f"{secrets.token_hex(8)}-{number}" for number in itertools.count())
    while waiting := list(folder.iterdir()):
        for one in waiting:
            if one.is_symlink() or not one.is_dir():
                one.unlink()
                continue
            one.chmod(0o700)
            for inner in one.iterdir():
                if inner.is_dir() and not inner.is_symlink():
                    inner.chmod(0o700)
                inner.rename(next(names))
            one.rmdir()
