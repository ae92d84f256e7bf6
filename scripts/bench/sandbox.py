"""Try attacks on the sandbox of `reward=program` and `environment=python`, and note which it contains.

Each attack runs twice: as it is here, with namespaces, and where the kernel refuses them. The second is emulated in a
user namespace of its own, with processes, IPC and a network of its own, so that nothing of this machine is at risk.

An attack is contained if
- reach: the code does not print `REACHED`, which it does where it got what it wanted;
- limit: the code is ended by its limits, in time;
- grade: the wrong program gets reward 0 from tests `f(1) == 2`, and no error, in time;
and in each case no process and no folder is left.
"""

import argparse
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import record

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.rewards.program import passes_tests
from nemo_rl_lite.system.sandbox import Limits, refused, run_python

LIMITS = Limits(seconds=2.0, memory_mib=256, output=2000, processes=64)
# Seconds for the start, the end, and a machine with other work.
GRACE_S = 6.0
# The judge is not the first process of its namespace, which would be immune to signals.
PREFIX = "nrl-bench-"
RUN = '"$@"; exit $?'
REFUSING = f"echo 0 > /proc/sys/user/max_user_namespaces && {{ {RUN}; }}"
UNSHARE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--ipc", "--net", "--mount-proc")
TEST = "assert f(1) == 2\nassert f(5) == 6"
WITH, WITHOUT = "namespaces", "no namespaces"
REPETITIONS = 20


@dataclass(frozen=True)
class Attack:
    """What a program does. Names in angle brackets stand for what `world` makes."""

    name: str
    kind: str
    code: str
    tests: str = TEST


@dataclass
class Outcome:
    contained: bool
    how: str
    left: list[str] = field(default_factory=list)


def reaching(name: str, code: str) -> Attack:
    """Return an attack whose code succeeds if it raises nothing."""
    return Attack(name, "reach", f"import os, sys, socket, ctypes, signal, time\n{code}\nprint('REACHED')")


def reading(name: str, path: str) -> Attack:
    return reaching(name, f"assert open({path!r}, 'rb').read(4)")


def writing(name: str, path: str) -> Attack:
    return reaching(name, f"path = os.path.expanduser({path!r})\nopen(path, 'w').close()\nos.remove(path)")


LIBC = "libc = ctypes.CDLL(None, use_errno=True)"
REACHES = [
    reaching("TCP to a server of this machine", "socket.create_connection(('127.0.0.1', <port>), 1)"),
    reaching("UDP to the internet", "s = socket.socket(2, 2); s.connect(('8.8.8.8', 53))"),
    reaching("IPv6 to a server of this machine", "s = socket.socket(10, 1); s.connect(('::1', <port>))"),
    reaching("abstract Unix socket", "s = socket.socket(1); s.connect('\\0nrl-<parent>')"),
    reaching("Unix socket in a temporary folder", "s = socket.socket(1); s.connect('<path>')"),
    reaching("Unix socket in another folder", "s = socket.socket(1); s.connect('<own>')"),
    reaching("raw packets", "socket.socket(17, 3)"),
    reaching(
        "netlink: brings up an interface",
        "import fcntl\nfcntl.ioctl(socket.socket(2, 2), 0x8914, b'lo' + bytes(14) + b'\\x41' + bytes(21))",
    ),
    reaching("environment of its parent", "assert open(f'/proc/{os.getppid()}/environ', 'rb').read(4)"),
    reaching("memory of its parent", "assert open(f'/proc/{os.getppid()}/maps', 'rb').read(4)"),
    # In its own namespace the program finds other processes at this number.
    reaching("environment of the judge", "assert b'NRL_BENCH_SECRET' in open('/proc/<parent>/environ', 'rb').read()"),
    reaching(
        "memory of the judge",
        "assert 'bench' in open('/proc/<parent>/cmdline').read() and open('/proc/<parent>/maps').read()",
    ),
    reaching(
        "process_vm_readv of its parent",
        f"{LIBC}\nb = ctypes.create_string_buffer(8)\nv = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\nr = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\nassert libc.process_vm_readv(os.getppid(), v, 1, r, 1, 0) == 8",
    ),
    reaching("ptrace of its parent", f"{LIBC}\nassert libc.ptrace(16, os.getppid(), 0, 0) == 0"),
    reaching(
        "pidfd_getfd of its parent",
        f"{LIBC}\nfor n in range(3, 20):\n  if libc.syscall(438, os.pidfd_open(os.getppid()), n, 0) >= 0: break\nelse: raise OSError",
    ),
    reaching("descriptors of its parent", "os.readlink(f'/proc/{os.getppid()}/fd/3')"),
    reaching(
        "processes of this machine",
        "assert os.path.exists('/proc/<parent>/cmdline') and b'bench' in open('/proc/<parent>/cmdline', 'rb').read()",
    ),
    reaching(
        "a signal to the judge", "assert b'bench' in open('/proc/<parent>/cmdline', 'rb').read(); os.kill(<parent>, 0)"
    ),
    reaching("SIGKILL to all processes", "os.kill(-1, 9)"),
    reaching("SIGKILL to its parent", "p = os.getppid(); os.kill(p, 9); time.sleep(0.3); assert os.getppid() != p"),
    reaching(
        "SIGSTOP to its parent",
        "os.kill(os.getppid(), 19); time.sleep(0.1); assert 'T' in open(f'/proc/{os.getppid()}/stat').read().split()[2]",
    ),
    reaching("SIGINT to its parent", "p = os.getppid(); os.kill(p, 2); time.sleep(0.3); assert os.getppid() != p"),
    reaching(
        "slow the judge down",
        "assert b'bench' in open('/proc/<parent>/cmdline', 'rb').read(); os.sched_setscheduler(<parent>, os.SCHED_IDLE, os.sched_param(0))",
    ),
    writing("write to the home folder", str(Path.home() / "nrl-sandbox-attack")),
    reaching("write to /tmp of this machine", "assert os.path.exists('<temporary>')"),
    writing("write to /usr", "/usr/nrl-sandbox-attack"),
    writing("write into the Python environment", str(Path(sys.prefix) / "nrl-sandbox-attack")),
    writing("write into the package", str(record.ROOT / "nemo_rl_lite" / "nrl-sandbox-attack")),
    reaching("write to /dev/shm of this machine", "assert '<shared>' in os.listdir('/dev/shm')"),
    reaching("open a setting of the kernel for writing", "open('/proc/sys/kernel/core_pattern', 'r+')"),
    reaching(
        "open a control group for writing",
        "import glob\nopen(glob.glob('/sys/fs/cgroup/**/cgroup.procs', recursive=True)[0], 'a')",
    ),
    reaching(
        "open a disk",
        "import glob\nopen((glob.glob('/dev/vd*') + glob.glob('/dev/sd*') + glob.glob('/dev/nvme*') + ['/dev/mem'])[0], 'rb')",
    ),
    reaching("make a device", "os.mknod('disk', 0o60600, os.makedev(8, 0)); open('disk', 'rb')"),
    reaching(
        "load a kernel module",
        f"{LIBC}\nassert libc.syscall(175, b'', 0, b'') == 0 or ctypes.get_errno() not in (1, 38)",
    ),
    reaching("a user namespace with privileges", f"{LIBC}\nassert libc.unshare(0x10000000) == 0"),
    reaching("mount", f"{LIBC}\nassert libc.mount(b'x', b'/mnt', b'tmpfs', 0, None) == 0"),
    reaching("make a mount writable again", f"{LIBC}\nassert libc.mount(None, b'/', None, 32 | 4096, None) == 0"),
    reaching("unmount what hides /tmp", f"{LIBC}\nassert libc.umount2(b'/tmp', 2) == 0"),
    reaching("chroot", "os.chroot('/')"),
    reaching(
        "set-user-id file",
        "import shutil\nshutil.copy('/bin/true', 'x'); os.chmod('x', 0o4755); os.setuid(os.getuid() + 1 if os.getuid() == 0 else 0)",
    ),
    reaching("host name", "socket.sethostname('x')"),
    reaching("raise its limits", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    reaching("System V memory of this machine", "assert os.stat('/proc/self/ns/ipc').st_ino == <ipc>"),
    reaching("environment variables of the run", "assert 'NRL_BENCH_SECRET' in os.environ"),
    reading("file of the user", "<file>"),
]
CHILDREN = "import os, time\nfor _ in range({n}):\n  if os.fork() == 0: {then}\ntime.sleep(60)"
LIMITED = [
    ("endless loop", "while True: pass"),
    ("sleep", "import time; time.sleep(60)"),
    ("SIGSTOP to itself", "import os; os.kill(os.getpid(), 19)"),
    (
        "ignores SIGXCPU and SIGTERM",
        "import signal\nfor s in (24, 15, 2): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    ),
    ("a regular expression that backtracks", "import re; re.match('(a+)+b', 'a' * 40)"),
    ("a huge power", "x = 9 ** 9 ** 9"),
    ("memory", "x = bytearray(10**9)"),
    ("memory of many processes", CHILDREN.format(n=8, then="x = bytearray(10**8); time.sleep(60)")),
    (
        "memory that is shared",
        "import mmap, time\nimport os\nfor i in range(4):\n  if os.fork() == 0:\n    x = mmap.mmap(-1, 10**8); x.write(bytes(10**8)); time.sleep(60)\ntime.sleep(60)",
    ),
    (
        "memory in memfds",
        "import os, time\nfor _ in range(50): os.write(os.memfd_create('x'), bytes(10**7))\ntime.sleep(60)",
    ),
    (
        "memory in System V segments",
        "import ctypes, time\nc = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p\nfor _ in range(9):\n  p = c.shmat(c.shmget(0, 10**8, 0o1600), None, 0); ctypes.memset(p, 1, 10**8); c.shmdt(ctypes.c_void_p(p))\ntime.sleep(60)",
    ),
    ("memory in files of /dev/shm", "for i in range(99): open(f'/dev/shm/nrl-{i}', 'wb').write(bytes(10**7))"),
    ("files without end", "import time\nfor i in range(10**9):\n  with open(str(i), 'wb') as f: f.write(bytes(10**7))"),
    ("many empty files", "for i in range(10**7): open(str(i), 'w').close()"),
    ("a file without end", "f = open('x', 'wb')\nwhile True: f.write(bytes(10**6))"),
    ("output without end", "while True: print('x' * 10**6)"),
    ("many processes", CHILDREN.format(n=200, then="time.sleep(60)")),
    (
        "many threads",
        "import threading, time\nthreading.stack_size(2**16)\nfor _ in range(500): threading.Thread(target=time.sleep, args=(60,)).start()",
    ),
    # Of at most 4,096 and 1,024 processes, should it not be contained.
    ("fork bomb", "import os, time\nfor _ in range(12):\n  try: os.fork()\n  except OSError: pass\ntime.sleep(60)"),
    (
        "fork bomb of sessions",
        "import os, time\nfor _ in range(10):\n  try: os.fork() or os.setsid()\n  except OSError: pass\ntime.sleep(60)",
    ),
    (
        "a daemon",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: os.closerange(0, 64); time.sleep(99)\n  os._exit(0)\ntime.sleep(60)",
    ),
    (
        "a daemon, and it kills its parent",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(99)\n  os._exit(0)\ntime.sleep(0.3); os.kill(os.getppid(), 9); time.sleep(60)",
    ),
    ("open descriptors", "import os\nx = [os.open('/dev/null', 0) for _ in range(10**4)]"),
    ("deep recursion", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()"),
    ("segmentation fault", "import ctypes; ctypes.string_at(0)"),
]
WRONG = "def f(x): return 0\n"
ANY = "class A{base}:\n  __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *a: True\n  __ne__ = lambda *a: False\n  __sub__ = __rsub__ = __add__ = lambda a, b: a\n  __abs__ = __hash__ = lambda a: 0\ndef f(x): return A({value})\n"
OWN = "class S:\n  __sub__ = lambda a, b: 0.0\n  def f(a, x): return a\n"
GRADED = [
    ("sys.exit", WRONG + "import sys; sys.exit(0)"),
    ("os._exit", WRONG + "import os; os._exit(0)"),
    ("os._exit in the call", "import os\ndef f(x): os._exit(0)"),
    ("atexit", WRONG + "import atexit, os; atexit.register(os._exit, 0)"),
    ("sys.excepthook", WRONG + "import os, sys; sys.excepthook = lambda *a: os._exit(0)"),
    ("builtins.exec", WRONG + "import builtins; builtins.exec = lambda *a: None"),
    ("__main__.exec", WRONG + "import __main__; __main__.exec = lambda *a: None"),
    ("builtins.compile", WRONG + "import builtins\nc = compile\nbuiltins.compile = lambda *a, **k: c('', '', 'exec')"),
    ("builtins.AssertionError", WRONG + "import builtins; builtins.AssertionError = None"),
    (
        "settrace that skips lines",
        WRONG
        + "import sys\ndef t(f, e, a):\n  if e == 'line': f.f_lineno += 1\n  return t\nsys.settrace(t)\nf_ = sys._getframe()\nwhile f_: f_.f_trace = t; f_ = f_.f_back",
    ),
    (
        "writes what its frames hold on every pipe",
        WRONG
        + "import os, sys\nf_ = sys._getframe()\nwhile f_:\n  for v in f_.f_locals.values():\n    for n in range(3, 9):\n      try: os.write(n, v if isinstance(v, bytes) else str(v).encode())\n      except OSError: pass\n  f_ = f_.f_back\nos._exit(0)",
    ),
    (
        "looks for the tests among all objects",
        WRONG
        + "import gc\ndef f(x): return x + 1 if any('assert f' in str(o) for o in gc.get_objects() if isinstance(o, (str, bytes, dict, list))) else 0",
    ),
    (
        "looks for the tests in its memory",
        "import re\ndef f(x):\n  for line in open('/proc/self/maps'):\n    if '[heap]' in line:\n      a, b = (int(n, 16) for n in line.split()[0].split('-'))\n      with open('/proc/self/mem', 'rb') as m:\n        m.seek(a)\n        if ('ass' + 'ert f(1)').encode() in m.read(b - a): return x + 1\n  return 0",
    ),
    ("abs is 0", WRONG + "abs = lambda x: 0", "assert abs(f(1) - 2) < 1e-6"),
    ("zip is empty", WRONG + "zip = lambda *a: []", "for a, b in zip([f(1)], [2]): assert a == b"),
    (
        "math.isclose is True",
        WRONG + "import math; math.isclose = lambda *a, **k: True",
        "import math\nassert math.isclose(f(1), 2)",
    ),
    ("an own class math", WRONG + "class math: isclose = lambda *a: True", "assert math.isclose(f(1), 2)"),
    ("an object that equals all", ANY.format(base="", value="")),
    ("an int that equals all", ANY.format(base="(int)", value="9")),
    ("a float without distances", ANY.format(base="(float)", value="9"), "assert abs(f(1) - 2) < 1e-6"),
    ("a str that equals all", ANY.format(base="(str)", value="'9'"), "assert f(1) == '2'"),
    ("a list that equals all", ANY.format(base="(list)", value="[9]"), "assert f(1) == [2]"),
    (
        "a list of such objects",
        ANY.format(base="", value="").replace("return A()", "return [A()]"),
        "assert f(1) == [2]",
    ),
    ("an object that contains all", ANY.format(base="", value=""), "assert 2 in f(1)"),
    (
        "a class that equals all",
        "class M(type):\n  __eq__ = lambda *a: True\n  __hash__ = None\nclass f(metaclass=M):\n  __new__ = lambda c, x: c",
    ),
    (
        "says that it is ready",
        WRONG + "import os, struct\nos.write(3, struct.pack('!I', 9) + b'[\"ready\"]'); os._exit(0)",
    ),
    (
        "kills the tests",
        WRONG + "import os\nfor p in (1, 2):\n  try: os.kill(os.getpid() + p, 9)\n  except OSError: pass",
    ),
    ("stops the tests", WRONG + "import os\nos.kill(os.getpid() + 1, 19)"),
    (
        "reads the tests in the other process",
        "import glob, os\ndef f(x):\n  for p in glob.glob('/proc/[0-9]*/mem'):\n    try: return x + 1 if open(p, 'rb').seek(1) and str(os.getpid()) not in p and 'self' not in p and open(p.replace('mem', 'maps')).read(1) else 0\n    except OSError: pass\n  return 0",
    ),
    (
        "unittest.SkipTest",
        "import unittest\ndef f(x): raise unittest.SkipTest",
        "import unittest\nclass T(unittest.TestCase):\n  def test(s): s.assertEqual(f(1), 2)\nr = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert r.wasSuccessful() and not r.skipped",
    ),
    ("SystemExit in the call", "def f(x): raise SystemExit(0)"),
    ("removes the output of its judge", WRONG + "import os; os.remove('../output')"),
    ("a FIFO for its output", WRONG + "import os; os.mkfifo('../output')"),
    ("removes its folder", WRONG + "import shutil; shutil.rmtree('..')"),
    ("12,000 nested folders", WRONG + "import os\nfor _ in range(12000): os.mkdir('d'); os.chdir('d')"),
    (
        "a folder without permissions",
        WRONG + "import os; os.mkdir('d'); open('d/x', 'w'); os.chmod('d', 0); os.chmod('.', 0)",
    ),
    ("a child that keeps the pipes", WRONG + "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(60)"),
    ("kills its parent", WRONG + "import os; os.kill(os.getppid(), 9)"),
    ("output that is no text", WRONG + "import os; os.write(1, bytes(range(256)))"),
    ("a message of gigabytes", WRONG + "import os; os.write(3, b'\\xff' * 64)"),
    ("a result without end", "import itertools\ndef f(x): return itertools.count()", "assert list(f(1)) == [2]"),
    (
        "an int of the program, and tests that share its process",
        ANY.format(base="(int)", value="9"),
        "import asyncio\n" + TEST,
    ),
    (
        "math.isclose is True, and tests that share its process",
        WRONG + "import math; math.isclose = lambda *a: True",
        "import asyncio, math\nassert math.isclose(f(1), 2)",
    ),
    ("an object that the tests made, with its own minus", OWN, "assert abs(S().f(1) - 2) < 1e-6"),
    ("methods that say what the tests ask", "class S:\n  def same(s, x): return True", "assert S().same(2)"),
]
ATTACKS = [
    *REACHES,
    *(Attack(name, "limit", code) for name, code in LIMITED),
    *(Attack(name, "grade", *rest) for name, *rest in GRADED),
]


def main(arguments: list[str]) -> None:
    """Try all attacks and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of attacks (default: all)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(asdict(tried(next(one for one in ATTACKS if one.name == given.one)))))
        return
    attacks = [one for one in ATTACKS if not given.only or one.name in given.only]
    if why := refused():
        sys.exit(f"here the kernel refuses {why}")
    report(attacks, timed(REPETITIONS))


def report(attacks: Sequence[Attack], seconds: Sequence[float]) -> None:
    """Try the attacks and write the record."""
    setting, rows = Path("/proc/sys/user/max_user_namespaces").read_text(), []
    for attack in attacks:
        found = {way: elsewhere(attack, way) for way in (WITH, WITHOUT)}
        rows.append({"name": attack.name, "kind": attack.kind} | {way: asdict(one) for way, one in found.items()})
        print(
            *(f"{'contained' if one.contained else 'NOT      '}" for one in found.values()),
            attack.name,
            found[WITH].how,
            sep="  ",
            flush=True,
        )
    if Path("/proc/sys/user/max_user_namespaces").read_text() != setting:
        sys.exit("the machine's limit on user namespaces has changed")
    counts = {way: sum(row[way]["contained"] for row in rows) for way in (WITH, WITHOUT)}
    results = [record.result("attacks", "tried", "", [len(rows)])]
    results += [record.result("attacks contained", way, "", [count]) for way, count in counts.items()]
    results.append(record.result("one call", "print(1)", "ms", [1000 * one for one in seconds]))
    bars = [record.bar("attacks", len(rows), 50, at_least=True)]
    hardware = record.describe_hardware() | {"name": "cpu"}
    print(record.write("sandbox", results, bars, more={"hardware": hardware, "attacks": rows}))


def timed(repetitions: int) -> list[float]:
    """Return the seconds of calls that print a line."""
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run_python("print(1)", limits=LIMITS)
        found.append(time.perf_counter() - began)
    return found


def elsewhere(attack: Attack, way: str) -> Outcome:
    """Try an attack in a process with namespaces of its own, so that what it does to its judge ends there."""
    command = [*UNSHARE, "sh", "-c", REFUSING if way == WITHOUT else RUN, "sh"]
    command += [sys.executable, __file__, "--one", attack.name]
    environ = os.environ | {"NRL_BENCH_SECRET": "secret", "PYTHONPATH": str(record.ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, env=environ | {"TMPDIR": folder}, capture_output=True, text=True, check=False, timeout=90
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, "the judge does not end")
        finally:
            # Of a judge that was killed.
            for one in (*Path.home().glob(f"{PREFIX}*"), *Path("/dev/shm").glob(f"{PREFIX}*")):
                shutil.rmtree(one) if one.is_dir() else one.unlink()
    if done.returncode:
        return Outcome(False, f"the judge ended: {(done.stderr.strip().splitlines() or [done.returncode])[-1]}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def tried(attack: Attack) -> Outcome:
    """Try an attack here."""
    # As in the processes of user code.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    with world() as names:
        code = attack.code
        for name, value in names.items():
            code = code.replace(f"<{name}>", str(value))
        began = time.monotonic()
        outcome = graded(attack, code) if attack.kind == "grade" else ran(attack, code)
        if (seconds := time.monotonic() - began) > LIMITS.seconds + GRACE_S:
            outcome = Outcome(False, f"{outcome.how}, after {seconds:.0f} s")
        # No record names the folders of one machine.
        for folder, name in ((sys.prefix, "VENV"), (str(record.ROOT), "REPOSITORY"), (str(Path.home()), "HOME")):
            outcome.how = outcome.how.replace(folder, name)
        outcome.left = left()[:3]
        if outcome.left:
            outcome.contained = False
    return outcome


def ran(attack: Attack, code: str) -> Outcome:
    done = run_python(code, limits=LIMITS)
    last = (done.output.strip().splitlines() or [""])[-1]
    if attack.kind == "limit":
        return Outcome(True, f"limit on {done.limit}" if done.limit else f"status {done.status}: {last}"[:120])
    return Outcome("REACHED" not in done.output, last[:120] or f"status {done.status}")


def graded(attack: Attack, code: str) -> Outcome:
    problem = Problem(chat("?"), "", {"tests": attack.tests})
    try:
        reward = passes_tests(code, "", problem, seconds=LIMITS.seconds, memory_mib=LIMITS.memory_mib)
    except Exception as error:
        return Outcome(False, f"an error: {error!r}"[:120])
    return Outcome(reward == 0.0, f"reward {reward:g}")


def left() -> list[str]:
    """Return processes and folders of a sandbox that are still there after a moment."""
    late = time.monotonic() + 60
    while time.monotonic() < late:
        found = [str(one) for one in Path(tempfile.gettempdir()).glob("nrl-sandbox-*")]
        files = [*Path("/dev/shm").glob("nrl-[0-9]*")]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if b"NRL_SANDBOX=" in (process / "environ").read_bytes():
                    found.append(process.name)
            except OSError:
                continue
        if files or not found:
            break
        time.sleep(0.1)
    for one in files:
        one.unlink()
    return [*found, *map(str, files)]


@contextmanager
def world() -> Iterator[dict[str, object]]:
    """Make what attacks want to reach, and yield the names of it."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        subprocess.run(["ip", "link", "set", "lo", "up"], check=False, capture_output=True)
        server.bind(("127.0.0.1", 0))
        server.listen()
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=Path.home())))
        for address in (f"{temporary}/socket", f"{own}/socket", f"\0nrl-{os.getpid()}"):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(address)
            one.listen()
        (own / "file").write_text("text")
        shared = stack.enter_context(tempfile.NamedTemporaryFile(prefix=PREFIX, dir="/dev/shm"))
        yield {
            "port": server.getsockname()[1],
            "path": f"{temporary}/socket",
            "own": f"{own}/socket",
            "file": own / "file",
            "temporary": temporary,
            "shared": Path(shared.name).name,
            "parent": os.getpid(),
            "ipc": Path("/proc/self/ns/ipc").stat().st_ino,
        }


def trial() -> None:
    names = ("TCP to a server of this machine", "sleep", "an int that equals all", "kills its parent")
    # Without namespaces of its own, no attack is tried.
    report([one for one in ATTACKS if one.name in names and not refused()], timed(2))


if __name__ == "__main__":
    record.start(main, trial)
