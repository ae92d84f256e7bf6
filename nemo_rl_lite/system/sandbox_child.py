"""Process of `sandbox.run_python`: isolates itself, starts the program, and supervises it. Imports nothing of this
package.

    run_python -> this process -> init of the namespaces -> the program
    without namespaces: this process -> the program

The parent of the program supervises it: it enforces the limits on all its processes, and reports the result.
"""

import builtins
import ctypes
import fcntl
import json
import math
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x20000, 0x4000000, 0x8000000
_NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_PDEATHSIG, _DUMPABLE, _DROP_BOUNDING, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 24, 36, 38
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _REMOUNT, _BIND, _RECURSIVE = 1, 2, 4, 8, 32, 4096, 16384
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_CAPABILITIES_VERSION = 0x20080522
# World-writable folders, and folders with sockets of the host's services.
_SHARED = ("/tmp", "/var/tmp", "/run")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MOST_FILES = 20_000
# Prevents the program from creating a user namespace in which it has privileges.
_NO_NAMESPACES = ("sys/user/max_user_namespaces", "0")
_TICK_S = 0.02
# Seconds for killing the program's processes, without namespaces.
_KILL_S = 2.0


def isolate(box: str, memory: int) -> tuple[bool, str]:
    """Move to new namespaces of users, processes, network, IPC and mounts. Return whether the kernel allows it, and
    what it refuses."""
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_NEW_USER | _NEW_PIDS | _NEW_NETWORK | _NEW_IPC | _NEW_UTS | _NEW_MOUNTS):
        return False, f"namespaces: {os.strerror(ctypes.get_errno())}"
    write("self/setgroups", "deny")
    write("self/uid_map", f"{user} {user} 1")
    write("self/gid_map", f"{group} {group} 1")
    write(*_NO_NAMESPACES)
    refused = []
    for step in (make_read_only, lambda: hide_files(box, memory)):
        try:
            step()
        except OSError as error:
            refused.append(f"mounts: {error.strerror}")
    return True, ", ".join(refused)


def write(name: str, text: str) -> None:
    """Write to a file of /proc if possible; parts of it are often read-only in containers."""
    with suppress(OSError), open(f"/proc/{name}", "w") as file:
        file.write(text)


def make_read_only() -> None:
    """Make every mount read-only, except for devices. Raises OSError, for example before Linux 5.12."""
    attributes, root = struct.pack("4Q", _READ_ONLY | _NO_SUID, 0, 0, 0), ctypes.c_char_p(b"/")
    check(_libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, root, _AT_RECURSIVE, attributes, len(attributes)))


def hide_files(box: str, memory: int) -> None:
    """Replace shared folders, devices and the box by empty folders in memory. Raises OSError."""
    empty = {os.path.realpath(one) for one in (*_SHARED, os.path.dirname(box)) if os.path.isdir(one)}
    empty |= {"/dev", "/dev/shm"}
    # Python may be installed below such a folder. Descriptors still reach covered folders.
    wanted = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(os.path.isdir, sys.path)}
    covered = [one for one in sorted(wanted) if any(one.startswith(f"{folder}/") for folder in empty)]
    held = {one: os.open(one, os.O_PATH) for one in covered}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    options = f"size={memory // 4},nr_inodes={_MOST_FILES},mode=1777"
    for folder in sorted(empty):
        os.makedirs(folder, exist_ok=True)
        mount("tmpfs", folder, "tmpfs", _NO_SUID | _NO_DEVICES, options)
    for path in held:
        os.makedirs(path, exist_ok=True)
    for path in devices:
        os.close(os.open(path, os.O_CREAT, 0o666))
    for path, descriptor in (held | devices).items():
        mount(f"/proc/self/fd/{descriptor}", path, "", _BIND | _RECURSIVE)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink("/proc/self/fd", "/dev/fd")
    os.makedirs(box, exist_ok=True)
    os.chdir(box)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = (one.encode() for one in (source, target, kind))
    check(_libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()))


def check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def guard() -> None:
    """Protect the memory, environment and descriptors of this process, and end with its parent."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_DUMPABLE, 0, 0, 0, 0)


def confine(asked: dict, is_isolated: bool) -> None:
    """Drop privileges permanently, and limit this process and its children."""
    os.setsid()
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for capability in range(64):
        _libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0)
    _libc.capset(struct.pack("Ii", _CAPABILITIES_VERSION, 0), bytes(24))
    seconds = math.ceil(asked["seconds"])
    most = {
        resource.RLIMIT_AS: asked["memory"],
        resource.RLIMIT_FSIZE: max(asked["output"], 2**24),
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    release = os.uname().release.split(".")
    if is_isolated and (int(release[0]), int(release[1])) >= (5, 14):
        # Without a user namespace, this would count all processes of the user.
        most[resource.RLIMIT_NPROC] = asked["processes"] + 4
    for kind, value in most.items():
        resource.setrlimit(kind, (value, value))
    # The soft limit sends SIGXCPU; the hard limit kills code that ignores the signal.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def supervise(asked: dict, program: int, late: float) -> dict:
    """Wait for the program. Return its status, or None and the exceeded limit."""
    while True:
        with suppress(InterruptedError):
            signal.sigtimedwait([signal.SIGCHLD], min(_TICK_S, max(late - time.monotonic(), 0)))
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program:
                    return {"status": os.waitstatus_to_exitcode(ended[1]), "limit": ""}
        if late <= time.monotonic():
            return {"status": None, "limit": "time"}
        found = descendants(asked["processes"])
        if sum(found.values()) > asked["processes"]:
            return {"status": None, "limit": "processes"}
        # Repeat: while processes end, shared pages count several times.
        if all(memory_of(descendants(sys.maxsize), asked["memory"]) > asked["memory"] for _ in range(3)):
            return {"status": None, "limit": "memory"}


def memory_of(processes: Iterable[int], limit: int) -> int:
    """Return the memory of processes in bytes. Up to the `limit` this is an upper bound: shared pages count for each
    process."""
    page, files, resident, own, shared = os.sysconf("SC_PAGESIZE"), dict[tuple[int, int], int](), 0, 0, 0
    for process in processes:
        with suppress(OSError, ValueError), open(f"/proc/{process}/statm") as file:
            resident += int(file.read().split()[1]) * page
        with suppress(OSError):
            for one in os.scandir(f"/proc/{process}/fd"):
                if os.readlink(one.path).startswith(("/memfd:", "/dev/shm/")):
                    status = os.stat(one.path)
                    files[status.st_dev, status.st_ino] = status.st_blocks * 512
    in_files = sum(files.values()) + segments()
    if resident + in_files <= limit:
        return resident + in_files
    for process in processes:
        try:
            with open(f"/proc/{process}/smaps_rollup") as file:
                parts = {line.split()[0]: int(line.split()[1]) for line in file if line.startswith("Pss_")}
            own, shared = own + parts["Pss_Anon:"] * 1024, shared + parts["Pss_Shmem:"] * 1024
        except ProcessLookupError:
            continue
        except (OSError, KeyError, ValueError):
            return resident + in_files
    return own + max(shared, in_files)


def segments() -> int:
    """Return the bytes of System V shared memory in this IPC namespace; 0 in the host's."""
    if os.getpid() != 1:
        return 0
    with suppress(OSError, ValueError), open("/proc/sysvipc/shm") as file:
        head, *rows = (line.split() for line in file)
        return sum(int(row[head.index("rss")]) for row in rows)
    return 0


def descendants(most: int) -> dict[int, int]:
    """Return the thread counts of descendants by process id. Stop above `most` processes, because a fork bomb grows
    faster than it can be listed."""
    found, waiting = dict[int, int](), ["self"]
    while waiting and len(found) <= most:
        process = waiting.pop()
        with suppress(OSError):
            threads = os.listdir(f"/proc/{process}/task")
            if process != "self":
                found[int(process)] = len(threads)
            for thread in threads:
                with suppress(OSError), open(f"/proc/{process}/task/{thread}/children") as file:
                    waiting += file.read().split()
    return found


def kill_descendants(program: int) -> None:
    """Kill all descendants of this process, which adopts orphans. Needed only without a PID namespace."""
    with suppress(OSError):
        # Kill the group at once, because its members may fork faster than they can be listed.
        os.killpg(program, signal.SIGKILL)
    late = time.monotonic() + _KILL_S
    while time.monotonic() < late and (found := descendants(sys.maxsize)):
        for kind in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                with suppress(OSError):
                    os.kill(process, kind)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def start(run: Callable[[], None], *keep: int) -> int:
    """Fork a process that runs a function with descriptors 0 to 2, and `keep` from 3 on. Return its id."""
    if process := os.fork():
        return process
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, one in enumerate([fcntl.fcntl(one, fcntl.F_DUPFD, 64) for one in keep]):
        os.dup2(one, 3 + number)
    os.closerange(3 + len(keep), 1024)
    run()
    sys.exit()


def run_program(asked: dict, is_isolated: bool, steps: Callable[[CodeType], Iterator[CodeType]] | None = None) -> None:
    """Run the code as the main module. `steps` can add steps after it."""
    confine(asked, is_isolated)
    _libc.prctl(_DUMPABLE, 1, 0, 0, 0)
    sys.argv, sys.excepthook = ["<code>"], show
    module = sys.modules["__main__"] = ModuleType("__main__")
    code = compile(asked["code"], "<code>", "exec")
    # The frames above the code have no local variables of a suspended generator.
    for step in iter([code]) if steps is None else steps(code):
        exec(step, module.__dict__)  # noqa: S102 (what this process is for)


def serve_program(asked: dict, is_isolated: bool, values: ModuleType) -> None:
    """Run the code, and then the calls of its tests, which are another process."""
    run_program(asked, is_isolated)
    peer = values.Peer(values.socket.socket(fileno=3), is_open=True)
    peer.say()
    peer.serve()


def run_tests(asked: dict, is_isolated: bool, values: ModuleType) -> None:
    """Run the tests of a program in another process. Write the word if they reach their last line."""
    guard()
    word, tests, names = read_tests()
    confine(asked, is_isolated)
    for number in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    peer = values.Peer(values.socket.socket(fileno=5), is_open=False)
    peer.wait()
    exec(tests, values.Names(peer, names))  # noqa: S102 (what this process is for)
    os.write(4, word)
    os._exit(0)


def run_together(asked: dict, is_isolated: bool) -> None:
    """Run the code, and then its tests in the same process, with the original built-in functions and names."""

    def steps(code: CodeType) -> Iterator[CodeType]:
        run, say, untrace, fresh = exec, os.write, (sys.settrace, sys.setprofile), dict(vars(builtins))
        word, tests, _ = read_tests()
        yield code
        for one in untrace:
            one(None)
        own = {name: value for name, value in sys.modules["__main__"].__dict__.items() if name not in fresh}
        run(tests, own | {"__builtins__": fresh})
        say(4, word)

    run_program(asked, is_isolated, steps)


def read_tests() -> tuple[bytes, CodeType, str]:
    """Read the word and the tests before the program starts, which could interfere."""
    with os.fdopen(3) as given:
        word, _, text = given.read().partition("\n")
    return word.encode(), compile(text, "<tests>", "exec"), text


def start_all(asked: dict, is_isolated: bool, tests: int, values: ModuleType | None) -> tuple[int, int]:
    """Start the program and its tests, if any. Return the process whose end counts, and the descriptor for the word of
    the tests."""
    said, says = os.pipe()
    os.set_blocking(said, False)
    if values is not None:
        ours, theirs = values.socket.socketpair()
        start(lambda: serve_program(asked, is_isolated, values), theirs.fileno())
        counts = start(lambda: run_tests(asked, is_isolated, values), tests, says, ours.fileno())
        ours.close()
        theirs.close()
    elif asked["tests"]:
        counts = start(lambda: run_together(asked, is_isolated), tests, says)
    else:
        counts = start(lambda: run_program(asked, is_isolated))
    os.close(says)
    return counts, said


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends the code, without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def main() -> None:
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    told, tests, says = map(int, sys.argv[1:])
    with os.fdopen(told) as given:
        asked = json.loads(given.read())
    late = time.monotonic() + asked["seconds"]
    values = imported("sandbox_values") if asked["tests"] == "apart" else None
    is_isolated, refused = isolate(asked["box"], asked["memory"])
    guard()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    if is_isolated:
        if init := os.fork():
            _, status = os.waitpid(init, 0)
            os._exit(min(os.waitstatus_to_exitcode(status), 1) % 256)
        guard()
        flags = _NO_SUID | _NO_DEVICES | _NO_EXEC
        with suppress(OSError):
            # Containers that hide parts of /proc refuse a new one. The old one shows names, but no memory.
            mount("proc", "/proc", "proc", flags)
            write(*_NO_NAMESPACES)
            mount("proc", "/proc", "", flags | _READ_ONLY | _REMOUNT)
    else:
        _libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    counts, heard = start_all(asked, is_isolated, tests, values)
    found = supervise(asked, counts, late)
    word = ""
    with suppress(BlockingIOError):
        word = os.read(heard, 64).decode(errors="replace")
    if not is_isolated:
        kill_descendants(counts)
    os.write(says, json.dumps(found | {"refused": refused, "word": word}).encode())
    os._exit(0)


def imported(name: str) -> ModuleType:
    """Import a file next to this one, before files are hidden."""
    loader = SourceFileLoader(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    module = ModuleType(name)
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
