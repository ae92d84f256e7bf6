"""Measures the host memory that is free for this process. Imports nothing heavy."""

from collections.abc import Iterator
from pathlib import Path


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
