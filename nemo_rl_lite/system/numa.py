"""Binds a process to the CPUs, and its new memory to the NUMA node, of its GPU.

Copies from another node's memory cross the link between sockets, and the CPU optimizer would read its states across it.
Where the machine does not name the node, or forbids the binding, nothing changes.
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
# The numbers of set_mempolicy's system call, for which libc has no function. MPOL_PREFERRED: allocate on this node, and
# on others when it is full.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Binding:
    """The result of `bind`."""

    node: int | None
    """The NUMA node that the process is bound to; None: it is not bound."""
    cpus: frozenset[int]
    """The CPUs that the process may use."""
    memory: bool
    """Whether the policy allocates new memory on the node; otherwise on the node of the thread that writes it first."""
    note: str
    """What failed, and why; empty where nothing failed."""

    def describe(self) -> str:
        """One line for the log."""
        if self.node is None:
            return f"not bound to a NUMA node: {self.note}"
        done = f"bound to NUMA node {self.node}: {len(self.cpus)} CPUs" + (" and its memory" if self.memory else "")
        return f"{done}; {self.note}" if self.note else done


class NoNodeError(Exception):
    """A GPU's NUMA node is unknown, or this process may not use it."""


def node_of(gpu: str, root: Path = SYSFS) -> tuple[int, frozenset[int]]:
    """The NUMA node of the GPU at PCI address `gpu`, and the node's CPUs that this process may use. `root`: sysfs.

    Raises:
        NoNodeError: the machine does not name the node, or this process may use none of its CPUs.
    """
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
    """Bind all threads of this process, and those they start, to the NUMA node of the GPU at PCI address `gpu`. The
    result says where the machine forbids it. `root`: sysfs."""
    try:
        node, cpus = node_of(gpu, root)
        _run_on(cpus)
    except NoNodeError as error:
        return Binding(None, frozenset(os.sched_getaffinity(0)), False, str(error))
    except OSError as error:
        return Binding(None, frozenset(os.sched_getaffinity(0)), False, f"CPUs cannot be chosen here ({error})")
    refused = _prefer_memory_of(node)
    return Binding(node, cpus, not refused, refused)


def gpu_address(device: int = 0) -> str:
    """The PCI address, as sysfs writes it, of a GPU that this process sees."""
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def parse_cpulist(text: str) -> frozenset[int]:
    """The numbers in a list such as `0-3,8,10-11`.

    Raises:
        ValueError: `text` is no such list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _run_on(cpus: Set[int]) -> None:
    """Bind all threads. A new thread inherits its creator's CPUs, so repeat until there is no unbound thread."""
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
    """Set the memory policy of this thread and those that it starts. Return why that failed, or ""."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"memory is left where it is first written ({platform.machine()} is not known)"
    mask = (ctypes.c_ulong * (node // _BITS + 1))()
    mask[node // _BITS] = 1 << node % _BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than this number.
    bits = ctypes.c_ulong(len(mask) * _BITS + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_PREFERRED), mask, bits) == 0:
        return ""
    return f"memory is left where it is first written ({errno.errorcode.get(ctypes.get_errno(), 'refused')})"
