"""Facts of this machine: memory, GPUs, ports, disks, paths, and what its environment variables say. Imports nothing
heavy.

Restricts access to a run's Ray, whose ports would otherwise let anybody run code. Imports nothing heavy.
"""

import logging
import netrc
import os
import random
import secrets
import socket
import subprocess
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from nemo_rl_lite.errors import ConfigError, Violation

MIB = 2**20

# The environment of a process that computes on CPUs. It must not see GPUs: Ray does not hide them from an actor that
# asked for none. OpenMP threads sleep while they wait: beside a busy process, threads that spin take the cores that the
# others need (measured: docs/benchmarks/).
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}

# Above Ray's default ports, and below those that kernels use for outgoing connections.
LASTING_PORTS = range(20_000, 32_000)

# Bytes that a run writes at once when it starts, and bytes of a file's name in all usual file systems.
_ROOM, _LONGEST_NAME = 2**16, 255

# The Ray cluster that a run joins instead of starting its own, which it does with the values in OWN_RAY.
RAY_ADDRESS = "RAY_ADDRESS"

RAY_ADDRESS_FIX = "unset RAY_ADDRESS for a run on this machine alone, or start that cluster (ray start --head)"

OWN_RAY = ("", "local")

_ANSWER_LIMIT_S = 4.0

# torchrun and accelerate set all of these in each process that they start.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

# The number of tasks of one srun (SLURM_NTASKS is the job's, and a batch script has that as well), and of one mpirun.
_COUNTS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun"}

_COPIES_RULE = "starts this command once for each worker, and one launcher starts all of its workers itself"

WANDB = "https://api.wandb.ai"


def log_to_stderr() -> None:
    """Log messages from level INFO to stderr. A second call does nothing."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] %(message)s")


def local_path(text: str) -> Path:
    """The path that an argument names, without `~`, which a shell leaves in `--output=~/x`. For argparse's `type`.

    Raises:
        ArgumentTypeError: it is an address, or names the home of nobody.
    """
    if "://" in text:
        raise ArgumentTypeError(f"{text} is an address, and a path of this machine is needed")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ArgumentTypeError(f"{text}: {error}") from None


def why_not_writable(folder: Path) -> str:
    """Why a folder cannot be made or written: a file is in its place, a permission is missing, the disk is full; empty
    where it can. Makes a folder in the nearest one that exists, and removes it."""
    place = folder.absolute()
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in place.parts):
        return f"has a name of more than {_LONGEST_NAME} bytes"
    nearest = next(one for one in (place, *place.parents) if one.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file"
    try:
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".can-be-written-") as probe:
            (Path(probe) / "some").write_bytes(bytes(_ROOM))
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror or error}"
    return ""


def free_port() -> int:
    """A free port of this machine that the kernel does not use for outgoing connections, because it is opened later.

    Raises:
        OSError: there is no free port.
    """
    for port in [*random.sample(LASTING_PORTS, 20), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise OSError("no free port on this host")


def gpu_bytes(command: str = "nvidia-smi") -> int | None:
    """Memory of this machine's smallest GPU in bytes; None where there is no GPU, or the driver does not say."""
    try:
        return min(int(line) for line in _of_gpus("memory.total", command)) * MIB
    except ValueError:
        return None


def gpu_count(command: str = "nvidia-smi") -> int:
    """The number of this machine's GPUs; of those that CUDA_VISIBLE_DEVICES names, where it is set."""
    there = len(_of_gpus("name", command))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([one for one in visible.split(",") if one.strip()]))


def gpu_name(command: str = "nvidia-smi") -> str | None:
    """What the driver calls this machine's GPUs; None where there is none, or they are not all of the same kind."""
    names = set(_of_gpus("name", command))
    return names.pop() if len(names) == 1 else None


def _of_gpus(fact: str, command: str) -> list[str]:
    """A fact of each of this machine's GPUs; empty where there is none."""
    query = [command, f"--query-gpu={fact}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.splitlines()]


def free_host_bytes(system: Path = Path("/")) -> int:
    """Bytes that this process could still allocate: what the machine has available, or less where its control groups
    (of either version, its own or one above) allow less. `system` is where /proc and /sys are."""
    # The doctor imports this module also where psutil is missing.
    import psutil

    free = psutil.virtual_memory().available
    for folder in control_groups("memory", system):
        free = min(free, _allowed(folder, free))
    return free


def control_groups(controller: str, system: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process' control groups, of either version, that may limit `controller` (memory, cpu, ...):
    from its own to the top."""
    try:
        groups = (system / "proc/self/cgroup").read_text().split()
    except OSError:
        return
    mounted = system / "sys/fs/cgroup"
    for group in groups:
        _, controllers, path = group.split(":", 2)
        # Version 1 mounts each set of controllers under its own name, `cpu,cpuacct` for instance.
        if controllers and controller not in controllers.split(","):
            continue
        root = mounted / controllers
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _allowed(group: Path, unlimited: int) -> int:
    """Bytes that a control group still allows; `unlimited` where it sets no limit or cannot be read."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, now = int((group / limit).read_text()), int((group / used).read_text())
            kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            # The file is missing, or has "max".
            continue
        return most - now + int(kept.get(cached, 0))
    return unlimited


def ray_address() -> str:
    """Return what RAY_ADDRESS names; empty where it is not set, or empty."""
    return os.environ.get(RAY_ADDRESS, "")


def names_another(address: str) -> bool:
    """Return whether an address names a host and a port: `auto` is whatever runs on this machine."""
    return address not in (*OWN_RAY, "auto")


def why_unanswered(address: str) -> str:
    """Return why nothing answers at an address; empty where something does, or no host is named."""
    if not names_another(address):
        return ""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT_S).close()
    except ValueError:
        return "is no HOST:PORT"
    except (OSError, OverflowError) as error:
        return f"does not answer: {error}"
    return ""


def check_ray_address() -> None:
    """Raise ConfigError where RAY_ADDRESS names a cluster that does not answer."""
    if rule := why_unanswered(ray_address()):
        raise ConfigError([Violation(RAY_ADDRESS, ray_address(), rule, RAY_ADDRESS_FIX)])


def check_single_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where this process is one of several copies of the command.

    A command that joins a running Ray may stand in one of the tasks that started it.
    """
    if environ.get(RAY_ADDRESS, "") not in OWN_RAY:
        return
    counts = dict(_COUNTS)
    if all(name in environ for name in _OF_TORCHRUN):
        counts["WORLD_SIZE"] = "torchrun or accelerate"
    if environ.get("SLURM_PROCID", "0") != "0":
        counts["SLURM_NTASKS"] = "srun"
    for name, starter in counts.items():
        count = environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            fix = f"nrl-lite train ... without {starter}; on several nodes: nrl-lite slurm, or unset {name}"
            raise ConfigError([Violation(name, count, f"{starter} {_COPIES_RULE}", fix)])


def wandb_login(environment: Mapping[str, str], address: str) -> str:
    """The variable or file where W&B would find its key for the server at `address`; empty without one.

    Raises:
        OSError, netrc.NetrcParseError: the netrc file cannot be read.
    """
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if environment.get(name):
            return name
    file = netrc_file(environment)
    if not file.is_file():
        return ""
    entry = netrc.netrc(str(file)).authenticators(urlsplit(address).netloc)
    return str(file) if entry and entry[2] else ""


def netrc_file(environment: Mapping[str, str]) -> Path:
    if named := environment.get("NETRC"):
        return Path(named).expanduser()
    home = Path(environment.get("HOME", "~")).expanduser()
    return next((file for file in (home / ".netrc", home / "_netrc") if file.is_file()), home / ".netrc")


def close_to_others() -> None:
    """Let Ray, if this run starts it, serve only processes that know a secret made here, which its workers inherit.
    Call this before ray is imported, because ray reads these variables then. Do nothing where RAY_ADDRESS names a
    cluster, or RAY_AUTH_MODE is set."""
    if ray_address() in OWN_RAY and "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
