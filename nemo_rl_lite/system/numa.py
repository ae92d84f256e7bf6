"""Bind a process and its new memory to the NUMA node of its GPU.

Otherwise copies and the CPU optimizer would use the link between sockets. If the machine does not report the node, or
forbids the binding, nothing changes.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")
# System call numbers of set_mempolicy, which libc lacks. MPOL_PREFERRED: allocate on this node, and on others if it is
# full.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Binding:
    """The result of `bind`."""

    node: int | None
    """NUMA node of the process; None if it is not bound."""
    cpus: frozenset[int]
    """CPUs that the process may use."""
    memory: bool
    """True if new memory is allocated on the node; otherwise on the node of the thread that writes it first."""
    note: str
    """Reason of a failure, or ""."""

    def describe(self) -> str:
        """Return one line for the log."""
        if self.node is None:
            return f"not bound to a NUMA node: {self.note}"
        done = f"bound to NUMA node {self.node}: {len(self.cpus)} CPUs" + (" and its memory" if self.memory else "")
        return f"{done}; {self.note}" if self.note else done


class NoNodeError(Exception):
    """A GPU's NUMA node is unknown, or this process may not use it."""


def node_of(gpu: str, root: Path = SYSFS) -> tuple[int, frozenset[int]]:
    """Return the NUMA node of the GPU at PCI address `gpu`, and its CPUs that this process may use. `root`: sysfs.
    Raises NoNodeError: the machine does not report the node, or this process may use none of its CPUs."""
    try:
        node = int((root / "bus/pci/devices" / gpu / "numa_node").read_text())
        if node < 0:
            raise NoNodeError(f"the machine names no node for GPU {gpu}")
        there = parse_cpulist((root / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError) as error:
        raise NoNodeError(f"sysfs does not name GPU {gpu}'s node ({error})") from error
    cpus = frozenset(os.sched_getaffinity(0)) & there
    if not cpus:
        raise NoNodeError(f"this process may use no CPU of node {node}, which GPU {gpu} is on")
    return node, cpus


def bind(gpu: str, root: Path = SYSFS) -> Binding:
    """Bind all threads of this process, and their new threads, to the NUMA node of the GPU at PCI address `gpu`. The
    result reports failures. `root`: sysfs."""
    try:
        node, cpus = node_of(gpu, root)
        _run_on(cpus)
    except NoNodeError as error:
        return Binding(None, frozenset(os.sched_getaffinity(0)), False, str(error))
    except OSError as error:
        return Binding(None, frozenset(os.sched_getaffinity(0)), False, f"CPUs cannot be chosen here ({error})")
    refused = _prefer_memory_of(node)
    return Binding(node, cpus, not refused, refused)


def gpu_address() -> str:
    """Return the PCI address of the first visible GPU in sysfs notation."""
    import torch

    properties: Any = torch.cuda.get_device_properties(0)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def parse_cpulist(text: str) -> frozenset[int]:
    """Parse a list such as `0-3,8,10-11`. Raises ValueError: `text` is not such a list."""
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _run_on(cpus: Set[int]) -> None:
    """Bind all threads. A new thread inherits its creator's CPUs, so repeat until all threads are bound."""
    moved: set[int] = set()
    while waiting := {int(entry.name) for entry in Path("/proc/self/task").iterdir()} - moved:
        for thread in waiting:
            try:
                os.sched_setaffinity(thread, cpus)
            except ProcessLookupError:
                # The thread has ended.
                continue
        moved |= waiting


def _prefer_memory_of(node: int) -> str:
    """Set the memory policy of this thread and its new threads. Return the reason of a failure, or ""."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"memory is left where it is first written ({platform.machine()} is not known)"
    mask = (ctypes.c_ulong * (node // _BITS + 1))()
    mask[node // _BITS] = 1 << node % _BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit fewer.
    bits = ctypes.c_ulong(len(mask) * _BITS + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_PREFERRED), mask, bits) == 0:
        return ""
    return f"memory is left where it is first written ({errno.errorcode.get(ctypes.get_errno(), 'refused')})"
