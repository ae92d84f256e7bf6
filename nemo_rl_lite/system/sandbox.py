"""Runs untrusted Python code in a process with limits on time, memory, files and output, without a network if possible.

The limits stop accidents and the usual tricks of a policy that is rewarded for passing tests. They do not stop an
attacker: the code runs as this user and can read this user's files. Use a container for that.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl_lite.system.machine import MIB

_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True)
class Limits:
    """`seconds` of wall-clock and of processor time, `memory_mib` of address space, bytes of `output` that are kept."""

    seconds: float = 10.0
    memory_mib: int = 1024
    output: int = 10_000


@dataclass(frozen=True)
class Ran:
    """The end of the code: its exit status (None: killed after its time), whether it reached its last line (a call of
    `exit` prevents that), and its output."""

    status: int | None
    is_complete: bool
    output: str


def run_python(*codes: str, stdin: str = "", limits: Limits | None = None, errors: bool = True) -> Ran:
    """Run the codes as one script in an empty folder, which is deleted afterwards. `errors`: the output includes
    standard error."""
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="nrl-sandbox-") as folder:
        paths = {name: Path(folder) / name for name in ("stdin", "output")}
        paths["stdin"].write_text(stdin)
        (Path(folder) / "box").mkdir()
        # Code cannot guess what it would have to write where it ends; only code that searches its process finds it.
        word = secrets.token_hex(16)
        asked = json.dumps({"codes": codes, "word": word, "memory": limits.memory_mib * MIB, **asdict(limits)})
        with paths["stdin"].open() as given, paths["output"].open("wb") as written:
            (read, write), (said, says) = os.pipe(), os.pipe()
            process = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD), str(read), str(says)],
                stdin=given,
                stdout=written,
                stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
                cwd=Path(folder) / "box",
                env={"PATH": os.defpath, "HOME": str(Path(folder) / "box"), "PYTHONHASHSEED": "0"},
                pass_fds=[read, says],
                start_new_session=True,
            )
            os.close(read)
            os.close(says)
            with suppress(OSError), os.fdopen(write, "w") as told:
                told.write(asked)
            try:
                status = process.wait(limits.seconds)
            except subprocess.TimeoutExpired:
                status = None
            if status == -signal.SIGXCPU:
                # Its processor time was over first.
                status = None
            # What the code has started, too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            is_complete = os.read(said, 64) == word.encode()
            os.close(said)
        with paths["output"].open("rb") as written:
            output = written.read(limits.output).decode(errors="replace")
    return Ran(status, is_complete, output)
