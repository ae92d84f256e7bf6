"""Checks the host: memory and its limits, CPUs, shared memory and disks."""

import math
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nemo_rl_lite.diagnosis.check import FAIL, Check, Machine, judge
from nemo_rl_lite.host.machine import control_groups, free_host_bytes

GIB = 2**30
# The default run's processes at their peak (docs/benchmarks), and Ray's.
ENOUGH_MEMORY = 6 * GIB
ENOUGH_DISK = 20 * GIB
# Ray takes this share of the host's memory for objects, and at most 10 GB where /dev/shm has no more.
RAY_SHARE, RAY_MOST = 0.3, 10**10
# Ray treats a disk as full from this share on.
FULL_DISK = 0.95


def memory(machine: Machine) -> Iterator[Check]:
    """Check the memory that the machine and the control groups of this process leave free."""
    import psutil

    there, free = psutil.virtual_memory(), free_host_bytes(machine.system)
    found = f"{_gib(free)} free of {_gib(there.total)}"
    if free < there.available:
        found = f"{_gib(free)} free: a control group of this process allows no more ({_gib(there.total)} in total)"
    fix = "end what else runs, or give the job or container more (docker --memory, sbatch --mem)"
    yield judge("memory", free >= ENOUGH_MEMORY, found, _gib(ENOUGH_MEMORY), fix, "runs: workers would be killed")


def cpus(machine: Machine) -> Iterator[Check]:
    """Check how many CPUs this process may use, and the share of them that its control groups grant."""
    allowed = len(os.sched_getaffinity(0))
    granted = min([allowed, *map(cpu_quota, control_groups("cpu", machine.system))])
    found = f"{allowed} of {os.cpu_count()}" + f", of which a limit grants the time of {granted:g}" * (
        granted < allowed
    )
    fix = f"give the job or container more CPUs, or cluster.threads_per_worker={max(1, int(granted))}"
    off = "speed: workers take turns"
    yield judge("CPUs", allowed == granted > 1, found, f"the time of {max(2, allowed)}", fix, off)


def cpu_quota(group: Path) -> float:
    """CPUs whose time a control group grants, in version 2's file and then version 1's; infinite where it sets no
    limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):
            quota, period = (int(part) for name in names for part in (group / name).read_text().split())
            return quota / period if quota > 0 else math.inf
    return math.inf


def shared_memory(machine: Machine) -> Iterator[Check]:
    """Check /dev/shm: Ray keeps its objects there, and NCCL and tensor-parallel engines meet there."""
    import psutil

    fix = "docker run --shm-size=16g, or --ipc=host; as root: mount -o remount,size=16G /dev/shm"
    try:
        there = shutil.disk_usage(machine.system / "dev/shm")
    except OSError as error:
        yield Check("/dev/shm", FAIL, f"not usable: {error.strerror}", "a tmpfs", fix, "Ray")
        return
    wanted = min(RAY_SHARE * free_host_bytes(machine.system), RAY_MOST, RAY_SHARE * psutil.virtual_memory().total)
    found = f"{_gib(there.free)} free of {_gib(there.total)}"
    off = "speed: Ray's objects go to a disk; NCCL and tensor-parallel engines may not start"
    yield judge("/dev/shm", there.free >= wanted, found, _gib(wanted), fix, off)


def locked_memory(machine: Machine) -> Iterator[Check]:
    """Check the limit on page-locked memory, which runs on GPUs use."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.3g} MiB"
    if machine.gpus:
        fix = "ulimit -l unlimited; docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK"
        off = "policy.use_pinned_optimizer_offload, where the driver enforces the limit, and NCCL over InfiniBand"
        yield judge("RLIMIT_MEMLOCK", limit == resource.RLIM_INFINITY, found, "unlimited", fix, off)


def disks(machine: Machine) -> Iterator[Check]:
    """Check the disks of checkpoints and exports, and of Ray's files."""
    yield disk("disk of the current folder", Path.cwd(), "checkpoints (up to 14 bytes a parameter each) and exports")
    folder = existing(ray_folder())
    usage = shutil.disk_usage(folder)
    share = usage.used / usage.total
    found = f"{_gib(usage.free)} free for {folder}, {share:.0%} used"
    wanted, fix = f"{FULL_DISK:.0%} used at most", "free some (old sessions in ray/), or RAY_TMPDIR on another disk"
    yield judge("disk of Ray", share < FULL_DISK, found, wanted, fix, "objects that do not fit into Ray's memory")


def hub_disk(machine: Machine) -> Iterator[Check]:
    """Check the disk that models and datasets of the hub are downloaded to."""
    from huggingface_hub.constants import HF_HUB_CACHE

    yield disk("disk of the hub's cache", Path(HF_HUB_CACHE), "downloads of models and datasets")


def disk(name: str, folder: Path, off: str) -> Check:
    """Check that a folder, or the one that it would be made in, can be written and has room."""
    there, fix = existing(folder), "free some, or use another disk (hydra.run.dir=..., HF_HOME)"
    free = shutil.disk_usage(there).free
    found = f"{_gib(free)} free for {folder}"
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, FAIL, f"{there} cannot be written", "", "another folder (hydra.run.dir=..., HF_HOME)", off)
    return judge(name, free >= ENOUGH_DISK, found, _gib(ENOUGH_DISK), fix, off)


def ray_folder() -> Path:
    """Where Ray keeps its sessions: logs, sockets, and objects that do not fit into memory."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"


CHECKS = {"host": (memory, cpus, shared_memory, locked_memory, disks, hub_disk)}
