"""What Ray and the processes of a run need to find each other: ports, addresses, short paths, and no Ray in the way."""

import random
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nemo_rl_lite.diagnosis.check import Check, Examination, Machine, Status
from nemo_rl_lite.diagnosis.host import ray_folder
from nemo_rl_lite.host.ports import LASTING_PORTS

ANSWER_LIMIT_S = 3.0
# The longest path of a socket, and the longest that Ray appends to its folder.
LONGEST_PATH = 107
SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_TRIED_PORTS = 40


def running_ray(machine: Machine) -> Iterator[Check]:
    """Another Ray on this machine. The launcher never joins it by itself, but it has memory and ports."""
    import psutil

    nodes = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "raylet"]
    if not nodes:
        yield Check("Ray", Status.OK, "none is running; each run starts its own")
        return
    found = f"{len(nodes)} running (raylet {', '.join(map(str, nodes[:4]))}{', ...' * (len(nodes) > 4)})"
    fix = "if no run needs it: ray stop"
    yield Check("Ray", Status.WARN, found, "none, but for other runs", fix, "the memory and CPUs that it has")


def ray_address(machine: Machine) -> Iterator[Check]:
    """RAY_ADDRESS makes the launcher join a cluster instead of starting its own."""
    address = machine.environment.get("RAY_ADDRESS")
    if address is None:
        yield Check("RAY_ADDRESS", Status.OK, "not set: a run starts a Ray of its own on this machine")
        return
    fix = "unset RAY_ADDRESS for a run on this machine alone, or start that cluster (ray start --head)"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        status = Status.OK if address in ("auto", "local") else Status.WARN
        yield Check("RAY_ADDRESS", status, address, "HOST:PORT", "" if status is Status.OK else fix)
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        yield Check("RAY_ADDRESS", Status.FAIL, f"{address} does not answer: {error}", fix=fix, off="every run")
        return
    yield Check("RAY_ADDRESS", Status.OK, f"{address} answers: runs join that cluster")


def ports(machine: Machine) -> Iterator[Check]:
    """Ports on which ranks meet."""
    name, span = "ports", f"{LASTING_PORTS.start}-{LASTING_PORTS.stop - 1}"
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        fix = "allow processes here to listen on 127.0.0.1 (is the loopback interface up?)"
        yield Check(name, Status.FAIL, f"none can be had on 127.0.0.1: {error.strerror}", fix=fix, off="every run")
        return
    free = sum(_is_free(port) for port in random.sample(LASTING_PORTS, _TRIED_PORTS))
    found = f"{free} of {_TRIED_PORTS} tried in {span} are free"
    overlap = _outgoing(machine.system)
    if free == 0:
        fix = f"allow processes here to listen on {span}"
        yield Check(
            name, Status.WARN, found, span, fix, "starts that are sure not to lose their port to another process"
        )
    elif overlap is not None:
        fix = 'sysctl -w net.ipv4.ip_local_port_range="32768 60999" (as root)'
        found = f"{found}, but the kernel hands out {overlap[0]}-{overlap[1]} for outgoing connections"
        off = "starts that are sure not to lose their port to another process"
        yield Check(name, Status.WARN, found, f"{span} left alone", fix, off)
    else:
        yield Check(name, Status.OK, found)


def host_name(machine: Machine) -> Iterator[Check]:
    """Gloo and Ray look up the machine's own name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        fix = f"a line '127.0.0.1 {name}' in /etc/hosts"
        found = f"{name} has no address: {error.strerror}"
        yield Check("host name", Status.WARN, found, fix=fix, off="gloo between ranks, where it has no interface named")
        return
    yield Check("host name", Status.OK, f"{name} is {address}")


def interfaces(machine: Machine) -> Iterator[Check]:
    """Interfaces that NCCL and gloo are told to use."""
    there = {name for _, name in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = machine.environment.get(variable)
        # NCCL takes prefixes, `=eth0` for exactly this one and `^eth0` for all but this one.
        if value is None or value.startswith("^"):
            continue
        named = [part for part in value.removeprefix("=").split(",") if part]
        if not any(name.startswith(part.partition(":")[0]) for part in named for name in there):
            found = f"{variable}={value}, and there are {', '.join(sorted(there))}"
            yield Check(
                variable, Status.WARN, found, fix=f"unset {variable}", off="several ranks: they do not find each other"
            )
        else:
            yield Check(variable, Status.OK, value)


def short_paths(machine: Machine) -> Iterator[Check]:
    """Ray's sockets lie in its folder, and a socket's path is short."""
    folder = ray_folder(machine.environment)
    length = len(str(folder / SOCKET).encode())
    found = f"sockets in {folder} have paths of {length} bytes"
    if length > LONGEST_PATH:
        yield Check(
            "Ray's folder", Status.FAIL, found, f"{LONGEST_PATH}", "RAY_TMPDIR=/tmp, or another short one", "every run"
        )
    elif not _can_be_made(folder):
        yield Check(
            "Ray's folder", Status.FAIL, f"{folder} cannot be written", fix="RAY_TMPDIR=FOLDER", off="every run"
        )
    else:
        yield Check("Ray's folder", Status.OK, found, f"{LONGEST_PATH} at most")


def slurm(machine: Machine) -> Iterator[Check]:
    command = shutil.which("sbatch", path=machine.environment.get("PATH"))
    job = machine.environment.get("SLURM_JOB_ID")
    if command is None and job is None:
        yield Check("Slurm", Status.SKIPPED, "not here; runs on this machine need none", off="sbatch")
    else:
        yield Check("Slurm", Status.OK, (command or "no sbatch") + (f", in job {job}" if job else ", in no job"))


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("", port))
        return True
    return False


def _outgoing(system: Path) -> tuple[int, int] | None:
    """The kernel's range of ports for outgoing connections, where it overlaps the launcher's."""
    with suppress(OSError, ValueError):
        first, last = map(int, (system / "proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        return (first, last) if first < LASTING_PORTS.stop and last >= LASTING_PORTS.start else None
    return None


def _can_be_made(folder: Path) -> bool:
    import os

    there = next(place for place in (folder, *folder.parents) if place.exists())
    return os.access(there, os.W_OK | os.X_OK)


EXAMINATIONS = (
    Examination("cluster", "Ray", running_ray),
    Examination("cluster", "RAY_ADDRESS", ray_address),
    Examination("cluster", "Ray's folder", short_paths),
    Examination("cluster", "ports", ports),
    Examination("cluster", "host name", host_name),
    Examination("cluster", "interfaces", interfaces),
    Examination("cluster", "Slurm", slurm),
)
