"""Keep a process on the CPUs, and its new memory on the node, that its GPU is attached to.

A GPU's link ends at one NUMA node; copies from another node's memory cross the link between sockets, and the CPU
optimizer would read its states across it. Where the machine does not say, or does not allow it, nothing is changed.
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
# set_mempolicy has no function in libc. The number of the system call, and that of the policy: this node, and others
# when it is full.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Binding:
    """Where this process runs after `bind`."""

    node: int | None
    """The NUMA node it was bound to; None where it was left alone."""
    cpus: frozenset[int]
    """CPUs it may use."""
    memory: bool
    """Whether new memory comes from the node by policy; otherwise from where the thread that first writes it runs."""
    note: str
    """What was not done, and why; empty where everything was."""

    def describe(self) -> str:
        """One line for the log."""
        if self.node is None:
            return f"not bound to a NUMA node: {self.note}"
        done = f"bound to NUMA node {self.node}: {len(self.cpus)} CPUs" + (" and its memory" if self.memory else "")
        return f"{done}; {self.note}" if self.note else done


class NoNodeError(Exception):
    """A GPU's NUMA node is not known, or not to be used: why."""


def node_of(gpu: str, root: Path = SYSFS) -> tuple[int, frozenset[int]]:
    """The NUMA node of the GPU at PCI address `gpu`, and those of its CPUs that this process may use. `root` is where
    sysfs is mounted.

    Raises:
        NoNodeError: the machine does not tell, or this process may use none of them.
    """
    try:
        node = int((root / "bus/pci/devices" / gpu / "numa_node").read_text())
        if node < 0:
            raise NoNodeError(f"the machine names no node for GPU {gpu}")
        there = parse_cpulist((root / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError) as error:
        raise NoNodeError(f"sysfs does not tell GPU {gpu}'s node ({error})") from error
    cpus = frozenset(os.sched_getaffinity(0)) & there
    if not cpus:
        raise NoNodeError(f"this process may use no CPU of node {node}, which GPU {gpu} is on")
    return node, cpus


def bind(gpu: str, root: Path = SYSFS) -> Binding:
    """Bind all threads of this process, and those they start, to the NUMA node of the GPU at PCI address `gpu`.

    Never raises on what the machine says or forbids; the result tells. `root` is where sysfs is mounted.
    """
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
    """The numbers in a list such as `0-3,8,10-11`; none in an empty one.

    Raises:
        ValueError: it is no such list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _run_on(cpus: Set[int]) -> None:
    """A new thread inherits its creator's CPUs, so all that run are moved, until a look finds no other."""
    moved: set[int] = set()
    while waiting := {int(entry.name) for entry in Path("/proc/self/task").iterdir()} - moved:
        for thread in waiting:
            try:
                os.sched_setaffinity(thread, cpus)
            except ProcessLookupError:
                # It ended meanwhile.
                continue
        moved |= waiting


def _prefer_memory_of(node: int) -> str:
    """Set this thread's memory policy, which threads it starts inherit; why it could not be set, or nothing."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"memory is left where it is first written ({platform.machine()} is not known)"
    mask = (ctypes.c_ulong * (node // _BITS + 1))()
    mask[node // _BITS] = 1 << node % _BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    bits = ctypes.c_ulong(len(mask) * _BITS + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_PREFERRED), mask, bits) == 0:
        return ""
    return f"memory is left where it is first written ({errno.errorcode.get(ctypes.get_errno(), 'refused')})"
