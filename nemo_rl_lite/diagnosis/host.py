"""The host: memory and its limits, CPUs, shared memory, files and disks."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from nemo_rl_lite.diagnosis.check import Check, Examination, Machine, Status
from nemo_rl_lite.host.memory import control_groups, free_host_bytes

GIB = 2**30
# The default run's processes at their peak (docs/benchmarks), and Ray's.
ENOUGH_MEMORY = 6 * GIB
# Ray takes 30 % of the free memory for objects, and at most 10 GB where /dev/shm has no more.
RAY_SHARE, RAY_MOST = 0.3, 10**10
# What Ray asks for; below the second it says that connections may fail.
ENOUGH_FILES, FEW_FILES = 8192, 4096
ENOUGH_DISK = 20 * GIB
# So many times as many processes want to run as there are CPUs.
BUSY = 1.5
# Ray takes a disk for full from this share on.
FULL_DISK = 0.95


def memory(machine: Machine) -> Iterator[Check]:
    """Free memory, by the machine and by the control groups of this process."""
    import psutil

    there = psutil.virtual_memory()
    free = free_host_bytes(machine.system)
    found = f"{_gib(free)} free of {_gib(there.total)}"
    if free < there.available:
        found = (
            f"{_gib(free)} free: a control group of this process allows no more ({_gib(there.total)} in the machine)"
        )
    if free < ENOUGH_MEMORY:
        fix = "end what else runs, or give the job or container more (docker --memory, sbatch --mem)"
        yield Check("memory", Status.WARN, found, _gib(ENOUGH_MEMORY), fix, "runs: workers would be killed")
    else:
        yield Check("memory", Status.OK, found)


def cpus(machine: Machine) -> Iterator[Check]:
    """CPUs that this process may use, and the share of them that its control groups grant."""
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    granted = cpu_quota(machine.system)
    found = f"{allowed} of {there}" if allowed < there else f"{there}"
    if granted is not None and granted < allowed:
        fix = (
            f"cluster.threads_per_worker={max(1, int(granted))} divided by the ranks of this machine, or a larger limit"
        )
        found = f"{found}, of which a control group grants the time of {granted:g}"
        off = "speed: the launcher counts CPUs, and starts more threads than have time to run"
        yield Check("CPUs", Status.WARN, found, f"{allowed} CPUs' time", fix, off)
    elif allowed < 2:
        yield Check("CPUs", Status.WARN, found, "2", "give the job more CPUs", "speed: policy and engine take turns")
    else:
        yield Check("CPUs", Status.OK, found)
    load = os.getloadavg()[0]
    if load > BUSY * there:
        found, fix = f"{load:.0f} processes want the {there} CPUs", "wait, or see with top what they are"
        yield Check("load", Status.WARN, found, f"{there} at most", fix, "speed")
    threads = machine.environment.get("OMP_NUM_THREADS")
    if threads is not None:
        yield Check("OMP_NUM_THREADS", Status.OK, f"{threads}; workers get cluster.threads_per_worker instead")


def cpu_quota(system: Path = Path("/")) -> float | None:
    """CPUs whose time the control groups of this process grant; None where they set no limit."""
    quotas = [quota for folder in control_groups("cpu", system) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def shared_memory(machine: Machine) -> Iterator[Check]:
    """Ray keeps its objects in /dev/shm, NCCL and tensor-parallel engines meet there. (A refit does not need it.)"""
    import psutil

    fix = "docker run --shm-size=16g, or --ipc=host; as root: mount -o remount,size=16G /dev/shm"
    try:
        there = shutil.disk_usage(machine.system / "dev/shm")
    except OSError as error:
        yield Check("/dev/shm", Status.FAIL, f"not usable: {error.strerror}", "a tmpfs", fix, "Ray")
        return
    # Ray's own rule for how much it takes.
    wanted = min(RAY_SHARE * free_host_bytes(machine.system), RAY_MOST, RAY_SHARE * psutil.virtual_memory().total)
    found = f"{_gib(there.free)} free of {_gib(there.total)}"
    if there.free < wanted:
        off = "speed: Ray's objects go to a disk; NCCL and tensor-parallel engines may not start"
        yield Check("/dev/shm", Status.WARN, found, _gib(wanted), fix, off)
    else:
        yield Check("/dev/shm", Status.OK, found, _gib(wanted))


def locked_memory(machine: Machine) -> Iterator[Check]:
    name = "RLIMIT_MEMLOCK"
    limit, found = _limit(resource.RLIMIT_MEMLOCK)
    if not machine.gpus.gpus:
        yield Check(name, Status.SKIPPED, f"{found}; only runs on GPUs lock memory")
    elif limit is None:
        yield Check(name, Status.OK, found)
    else:
        fix = "ulimit -l unlimited; docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK"
        off = "policy.use_pinned_optimizer_offload, where the driver heeds it, and NCCL over InfiniBand"
        yield Check(name, Status.WARN, found, "unlimited", fix, off)


def open_files(machine: Machine) -> Iterator[Check]:
    """Ray raises the limit as far as it may, so the upper one counts."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = hard == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else str(hard)
    if unlimited or hard >= FEW_FILES:
        yield Check("RLIMIT_NOFILE", Status.OK, found, str(ENOUGH_FILES))
        return
    fix = "ulimit -Hn 65536 (as root); docker run --ulimit nofile=65536"
    yield Check("RLIMIT_NOFILE", Status.WARN, found, str(ENOUGH_FILES), fix, "Ray with many workers: connections fail")


def disks(machine: Machine) -> Iterator[Check]:
    """Room for checkpoints, for models of the hub, and for what Ray writes."""
    places = {
        "disk of the current folder": (machine.folder, "checkpoints (up to 14 bytes a parameter each) and exports"),
        "disk of the hub's cache": (hub_cache(machine.environment), "downloads of models and datasets"),
    }
    for name, (folder, off) in places.items():
        free = shutil.disk_usage(_existing(folder)).free
        found = f"{_gib(free)} free for {folder}"
        if free < ENOUGH_DISK:
            fix = "free some, or use another disk (hydra.run.dir=..., HF_HOME)"
            yield Check(name, Status.WARN, found, _gib(ENOUGH_DISK), fix, off)
        else:
            yield Check(name, Status.OK, found, _gib(ENOUGH_DISK))
    temporary = ray_folder(machine.environment)
    usage = shutil.disk_usage(_existing(temporary))
    share = usage.used / usage.total
    found = f"{_gib(usage.free)} free for {temporary}, {share:.0%} used"
    if share >= FULL_DISK:
        fix = "free some (old sessions in ray/ among it), or RAY_TMPDIR on another disk"
        yield Check(
            "disk of Ray", Status.WARN, found, f"{FULL_DISK:.0%} used at most", fix, "objects that leave Ray's memory"
        )
    else:
        yield Check("disk of Ray", Status.OK, found)


def outputs(machine: Machine) -> Iterator[Check]:
    """Runs are written to outputs/ in the current folder."""
    folder = _existing(machine.folder / "outputs")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        fix = "another current folder, or hydra.run.dir=FOLDER"
        yield Check("outputs", Status.FAIL, f"{folder} cannot be written: {error.strerror}", fix=fix, off="every run")
        return
    yield Check("outputs", Status.OK, f"{folder} can be written")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it downloads."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    return Path(environment.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def ray_folder(environment: Mapping[str, str]) -> Path:
    """Where Ray keeps its sessions, with logs, sockets and objects that found no room in memory."""
    return Path(environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp") / "ray"


def _quota(group: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((group / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _limit(kind: int) -> tuple[int | None, str]:
    """The limit in force, None where there is none, and in words."""
    limit = resource.getrlimit(kind)[0]
    if limit == resource.RLIM_INFINITY:
        return None, "unlimited"
    return limit, f"{limit / 2**20:.3g} MiB"


def _existing(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"


EXAMINATIONS = (
    Examination("host", "memory", memory),
    Examination("host", "CPUs", cpus),
    Examination("host", "/dev/shm", shared_memory),
    Examination("host", "RLIMIT_MEMLOCK", locked_memory),
    Examination("host", "RLIMIT_NOFILE", open_files),
    Examination("host", "disks", disks),
    Examination("host", "outputs", outputs),
)
