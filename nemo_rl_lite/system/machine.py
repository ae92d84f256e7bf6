"""Facts of this machine: memory, GPUs, ports, disks, paths, environment variables. Imports nothing heavy.

`close_to_others` protects the Ray of a run, whose ports would otherwise let any user run code.
"""

import errno
import logging
import math
import netrc
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from nemo_rl_lite.errors import ConfigError, Violation

MIB = 2**20
# Environment of a process that computes on CPUs. Ray does not hide GPUs from an actor without any. OpenMP threads
# sleep while they wait, because spinning threads take cores from other processes (docs/benchmarks/).
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
# Ports above Ray's defaults, and below those of outgoing connections.
LASTING_PORTS = range(20_000, 32_000)
# Bytes that a starting run writes, and maximum bytes of a file name.
_ROOM, _LONGEST_NAME = 2**16, 255
# After a failed write, a disk with fewer free bytes counts as full.
_FULL = 2**26
# Variable with the Ray cluster that a run joins. With a value in OWN_RAY, a run starts its own.
RAY_ADDRESS = "RAY_ADDRESS"
RAY_ADDRESS_FIX = "unset RAY_ADDRESS for a run on only this machine, or start that cluster (ray start --head)"
OWN_RAY = ("", "local")
_ANSWER_LIMIT_S = 4.0
# Device of the driver, present even in containers without nvidia-smi.
_NVIDIA_DEVICE = Path("/dev/nvidiactl")
# Variables that torchrun and accelerate set in each process.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# Number of tasks of an srun, and of an mpirun. A batch script also has SLURM_NTASKS, the job's.
_COUNTS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun"}
_COPIES_RULE = "starts this command once per worker, but one launcher starts all workers itself"
_WANDB = "api.wandb.ai"


def log_to_stderr() -> None:
    """Log messages of level INFO and above to stderr. A second call does nothing."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] %(message)s")


def local_path(text: str) -> Path:
    """Convert an argument to a path, as argparse's `type`. Expands `~`, which a shell leaves in `--output=~/x`. Raises
    ArgumentTypeError: it is a URL, or an unknown user's home."""
    if "://" in text:
        raise ArgumentTypeError(f"{text} is a URL, not a local path")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ArgumentTypeError(f"{text}: {error}") from None


def why_not_writable(folder: Path) -> str:
    """Return why a folder cannot be created or written, or "". Creates and removes a folder in the nearest existing
    one."""
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


def why_full(folder: Path, error: BaseException) -> str:
    """Return that the disk of a folder is full, according to an error or the free space, or ""."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return ""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT) and usage.free >= _FULL:
        return ""
    return f"the disk is full: {folder} has {usage.free / MIB:,.0f} MiB free of {usage.total / MIB:,.0f} MiB"


def cache_folder() -> Path:
    """Return the folder that a user's runs share; `outputs` in the working folder if it cannot be written."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (given if given.is_absolute() else Path("~/.cache").expanduser()) / "nemo_rl_lite"
    except RuntimeError:  # the user has no home
        return Path("outputs")
    return Path("outputs") if why_not_writable(folder) else folder


def free_port() -> int:
    """Return a free port outside the range of outgoing connections, because it is opened later. Raises OSError: there
    is no free port."""
    for port in [*random.sample(LASTING_PORTS, 20), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise OSError("no free port on this host")


def gpu_bytes(command: str = "nvidia-smi") -> int | None:
    """Return the memory of the smallest GPU in bytes; None without a GPU, or if the driver does not report it."""
    try:
        return min(int(line) for line in _of_gpus("memory.total", command)) * MIB
    except ValueError:
        return None


def gpu_count(command: str = "nvidia-smi") -> int:
    """Return the number of visible GPUs."""
    there = len(_of_gpus("name", command))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([one for one in visible.split(",") if one.strip()]))


def lacks_gpus(wanted: int, command: str = "nvidia-smi") -> bool:
    """Return whether this machine certainly has fewer GPUs. Unknown with MIG, and with a driver but no nvidia-smi."""
    if not wanted or gpu_count(command) >= wanted:
        return False
    unlisted = shutil.which(command) is None and _NVIDIA_DEVICE.exists()
    return not unlisted and "Enabled" not in _of_gpus("mig.mode.current", command)


def gpu_name(command: str = "nvidia-smi") -> str | None:
    """Return the name of this machine's GPUs; None without a GPU, or if they differ."""
    names = set(_of_gpus("name", command))
    return names.pop() if len(names) == 1 else None


def _of_gpus(fact: str, command: str) -> list[str]:
    query = [command, f"--query-gpu={fact}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.splitlines()]


def free_host_bytes(system: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate, on the machine and within its control groups. `system`:
    parent of /proc and /sys."""
    # The doctor imports this module without psutil, too.
    import psutil

    return int(min([psutil.virtual_memory().available, *map(_allowed_bytes, control_groups("memory", system))]))


def control_groups(controller: str, system: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process' control groups (v1 or v2) that may limit `controller` (memory, cpu, ...), from
    the innermost to the root."""
    try:
        groups = (system / "proc/self/cgroup").read_text().split()
    except OSError:
        return
    mounted = system / "sys/fs/cgroup"
    for group in groups:
        _, controllers, path = group.split(":", 2)
        # Version 1 mounts each set of controllers under its name, such as `cpu,cpuacct`.
        if controllers and controller not in controllers.split(","):
            continue
        root = mounted / controllers
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _allowed_bytes(group: Path) -> float:
    """Return the bytes that a control group still allows; infinity without a readable limit."""
    for limit, used, cached in (
        ("memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        try:
            most, now = int((group / limit).read_text()), int((group / used).read_text())
            kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            # A file is missing, or has "max".
            continue
        # The kernel frees cached files before it ends a process.
        return most - now + sum(int(kept.get(name, 0)) for name in cached)
    return math.inf


def ray_address() -> str:
    """Return RAY_ADDRESS, or ""."""
    return os.environ.get(RAY_ADDRESS, "")


def names_another(address: str) -> bool:
    """Return whether an address names a host and a port; `auto` is the cluster of this machine."""
    return address not in (*OWN_RAY, "auto")


def why_unanswered(address: str) -> str:
    """Return why nothing answers at an address, or ""."""
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
    """Raise ConfigError: RAY_ADDRESS names a cluster that does not answer."""
    if rule := why_unanswered(ray_address()):
        raise ConfigError([Violation(RAY_ADDRESS, ray_address(), rule, RAY_ADDRESS_FIX)])


def check_single_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if torchrun, srun or mpirun started several copies of this command. With RAY_ADDRESS, the task
    may have started that cluster."""
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


def has_wandb_key(environment: Mapping[str, str]) -> bool:
    """Return whether a variable or the netrc file has a key of W&B. Raises OSError, netrc.NetrcParseError: the netrc
    file cannot be read."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    file = _netrc_file(environment)
    entry = netrc.netrc(str(file)).authenticators(_WANDB) if file.is_file() else None
    return bool(entry and entry[2])


def _netrc_file(environment: Mapping[str, str]) -> Path:
    if named := environment.get("NETRC"):
        return Path(named).expanduser()
    home = Path(environment.get("HOME", "~")).expanduser()
    return next((file for file in (home / ".netrc", home / "_netrc") if file.is_file()), home / ".netrc")


def close_to_others() -> None:
    """Protect the Ray that this run starts with a secret that its workers inherit. Does nothing if RAY_ADDRESS names a
    cluster, RAY_AUTH_MODE is set, or ray is already imported, which reads the variables."""
    if ray_address() in OWN_RAY and "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
