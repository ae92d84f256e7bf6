"""The sandbox contains what a program does, where the kernel allows namespaces and where it refuses them."""

import ctypes
import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from nemo_rl_lite.system import sandbox
from nemo_rl_lite.system.pool import CallPool, PoolTarget
from nemo_rl_lite.system.sandbox import Limits, Ran, run_python

FAST = Limits(seconds=2.0, memory_mib=256, output=1000, processes=32)
# Only inside a user namespace of this command's own: the machine's setting stays.
REFUSING = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
CALL = (
    "import json, sys\nfrom dataclasses import asdict\nfrom nemo_rl_lite.system.sandbox import Limits, run_python\n"
    "code, limits = json.loads(sys.argv[1])\nprint(json.dumps(asdict(run_python(code, limits=Limits(**limits)))))\n"
    "import threading\nfor one in threading.enumerate()[1:]: one.join()"
)


def without_namespaces(code: str, limits: Limits = FAST) -> Ran:
    """Run the code where the kernel refuses namespaces."""
    command = [sys.executable, "-c", CALL, json.dumps([code, asdict(limits)])]
    if not sandbox.refused():
        command = ["unshare", "--user", "--map-root-user", "sh", "-c", REFUSING, "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return Ran(**json.loads(done.stdout))


@pytest.fixture
def isolated() -> None:
    if sandbox.refused():
        pytest.skip(f"this kernel refuses {sandbox.refused()}")


@pytest.fixture(params=["namespaces", "no namespaces"])
def run(request):
    """`run_python`, both ways."""
    if request.param == "no namespaces":
        return without_namespaces
    request.getfixturevalue("isolated")
    return lambda code, limits=FAST: run_python(code, limits=limits)


def test_the_machines_setting_stays():
    before = Path("/proc/sys/user/max_user_namespaces").read_text()
    assert without_namespaces("print(1)").refused.startswith("namespaces: ")
    assert Path("/proc/sys/user/max_user_namespaces").read_text() == before


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("while True: pass", "time"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "time"),
        ("import os, time\nfor _ in range(64): os.fork() or time.sleep(60)\ntime.sleep(60)", "processes"),
        (
            "import threading, time\nthreading.stack_size(2**16)\n"
            "for _ in range(64): threading.Thread(target=time.sleep, args=(60,)).start()",
            "processes",
        ),
        (
            "import os, time\nfor _ in range(4): os.fork() or (x := bytearray(10**8)) and time.sleep(60)\n"
            "time.sleep(60)",
            "memory",
        ),
        ("import os, time\nfor _ in range(40): os.write(os.memfd_create('x'), bytes(10**7))\ntime.sleep(60)", "memory"),
    ],
)
def test_limits_of_all_processes_together(run, code, limit):
    started = time.monotonic()
    ran = run(code, FAST if limit == "time" else replace(FAST, seconds=30.0))
    assert (ran.status, ran.limit) == (None, limit) and time.monotonic() - started < 55


def test_limits_of_one_process(run):
    large = run("x = bytearray(10**9)")
    assert large.status == 1 and "MemoryError" in large.output
    assert len(run("print('x' * 10**6)").output) == 1000
    assert run("open('x', 'wb').write(bytes(10**8))").status != 0


@pytest.mark.parametrize(
    "code",
    [
        "import numpy; print(numpy.ones(2).sum() == 2)",
        "from multiprocessing import Pool\ndef f(x): return x\nwith Pool(2) as pool: print(pool.map(f, [True])[0])",
        "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', 'print(True)'], text=True))",
        "import tempfile; print(tempfile.NamedTemporaryFile('w').write('x') == 1)",
        "import threading; t = threading.Thread(target=print, args=(True,)); t.start(); t.join()",
        "open('/dev/null', 'w').write('x'); open('file', 'w').write('True'); print(open('file').read())",
        "import os, time\nx = bytearray(10**8)\nfor _ in range(4): os.fork() or time.sleep(0.2) or os._exit(0)\n"
        "os.wait(); print(True)",
        "import os; print(os.getcwd() == os.environ['HOME'] and not os.listdir())",
    ],
)
def test_programs_work(run, code):
    ran = run(code)
    assert (ran.status, ran.output.strip()) == (0, "True")


# Each leaves a process that this text names.
LEFT = "nrl-left-behind"
SLEEP = f"os.execlp('sh', 'sh', '-c', 'sleep 60; : {LEFT}')"
FORKS = f"import os, time\nif not os.fork():\n  os.setsid()\n  if not os.fork(): {SLEEP}\n  os._exit(0)"
DAEMON = f"{FORKS}\nos.wait(); time.sleep(0.2)"


@pytest.mark.parametrize(
    "end", ["", "os.kill(os.getppid(), 9)", "os.kill(os.getppid(), 19); time.sleep(60)", "os.kill(os.getpid(), 9)"]
)
def test_no_process_is_left(run, end):
    started = time.monotonic()
    run(f"{DAEMON}\n{end}")
    assert time.monotonic() - started < 45
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and left():
        time.sleep(0.05)
    assert not left()


def left() -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if LEFT in " ".join(one.info["cmdline"] or ())]


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.remove('../output')",
        "import os; os.mkfifo('../output'); os.mkfifo('../stdin')",
        "import shutil; shutil.rmtree('..')",
        "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')",
        "import os; os.mkdir('d'); open('d/x', 'w'); os.chmod('d', 0); os.chmod('.', 0)",
        "import os; os.rename('.', '../gone')",
        "import os; os.ftruncate(1, 0); os.lseek(1, 10**6, 0); os.write(1, b'x')",
        "import os; os.closerange(0, 64)",
        "import sys; sys.stdout = None; del sys.modules['sys']",
        "x = '\\ud800'; print(x)",
        "\0",
        "\ud800",
    ],
)
def test_no_program_raises_here_or_leaves_its_folder(run, code, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(sandbox.tempfile, "tempdir", None)
    assert isinstance(run(code), Ran)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and list(tmp_path.iterdir()):
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


def test_nothing_of_the_judge_can_be_read(run):
    code = (
        "import os\nfor p in ('1', str(os.getppid())):\n"
        "  for name in ('environ', 'mem', 'maps', 'fd/0', 'fd/3', 'cwd'):\n"
        "    name = f'/proc/{p}/{name}'\n"
        "    try: print(os.readlink(name) if 'fd' in name or 'cwd' in name else open(name, 'rb').read(9))\n"
        "    except OSError: pass"
    )
    assert run(code).output == ""


@pytest.mark.parametrize(
    "code",
    [
        "import os; print(os.getpid(), os.getppid(), *(p for p in os.listdir('/proc') if p.isdigit()))",
        "import os\ntry: os.kill(-1, 9)\nexcept ProcessLookupError: print(True)",
        "import os\ntry: open('/usr/x', 'w')\nexcept OSError: print(True)",
        f"import os\ntry: os.utime({str(Path(__file__))!r})\nexcept OSError: print(True)",
        "import os; print({'vda', 'sda', 'mem', 'kmsg', 'nvidia0', 'fuse', 'tty'}.isdisjoint(os.listdir('/dev')))",
        "import os; open('/tmp/x', 'w'), open('/dev/shm/x', 'w'); print(['x'] == os.listdir('/dev/shm'))",
        "import os; print(not os.path.exists('/run') or not os.listdir('/run'))",
        "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000) == -1)",
        "import ctypes; print(ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == -1)",
        "print(all(line.split()[1] == 16 * '0' for line in open('/proc/self/status') if line.startswith('Cap')))",
    ],
)
def test_a_program_is_alone(isolated, code):
    assert run_python(code, limits=FAST).output in ("True\n", "2 1 1 2\n")


def test_a_sandbox_that_does_not_start_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text("raise OSError('no memory')")
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")
    with pytest.raises(OSError, match="did not start: OSError: no memory"):
        run_python("print(1)", limits=FAST)


def dumpable() -> int:
    return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)


class Asked:
    def one(self) -> int:
        return dumpable()


def test_processes_of_user_code_cannot_be_read():
    pool = CallPool(PoolTarget(f"{__name__}.Asked", {}, "a process", "a limit"), 1, 1, 60.0)
    assert pool.submit("one").result() == 0 and dumpable() == 1


def test_a_program_reaches_no_server(isolated):
    server = socket.create_server(("127.0.0.1", 0))
    script = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
    assert run_python(script, limits=FAST).status == 1
    server.close()


def test_many_files_and_shared_memory_are_limited(isolated):
    full = run_python("for i in range(99):\n  open(f'/tmp/{i}', 'wb').write(bytes(10**7))", limits=FAST)
    assert "No space left" in full.output
    code = (
        "import ctypes, time\nc = ctypes.CDLL(None)\nc.shmat.restype = ctypes.c_void_p\nfor _ in range(9):\n"
        "  p = c.shmat(c.shmget(0, 10**8, 0o1600), None, 0); ctypes.memset(p, 1, 10**8); c.shmdt(ctypes.c_void_p(p))\n"
        "time.sleep(60)"
    )
    assert run_python(code, limits=FAST).limit == "memory"
