"""Reads what a Slurm task may use of its node. Imports nothing heavy."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from nemo_rl_lite.errors import LauncherError

MIB = 2**20
# The share of the job's memory on a node that Ray's object store gets; Ray uses the same share of a machine.
_OBJECT_STORE = 0.3


@dataclass(frozen=True)
class SlurmTask:
    """Task `rank` of `count`, one on each node, with the job's CPUs, GPUs and bytes of memory there. None: Slurm does
    not say, and Ray detects it. `address`: the one at which other nodes reach this node."""

    rank: int
    count: int
    cpus: int
    gpus: int | None
    memory: int | None
    address: str | None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], interface: str | None = None) -> "SlurmTask":
        """Read the variables that srun sets. `interface`: the network interface whose address is used.

        Raises:
            LauncherError: srun did not start this process; a node has several tasks; the interface does not exist.
        """
        missing = [name for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES") if name not in environ]
        if missing:
            raise LauncherError(f"{missing[0]} is not set: start this with srun --ntasks-per-node=1")
        tasks, nodes = int(environ["SLURM_NTASKS"]), int(environ["SLURM_NNODES"])
        if tasks != nodes:
            raise LauncherError(
                f"{tasks} tasks on {nodes} nodes, where one on each is needed: srun --ntasks-per-node=1"
            )
        cpus = len(os.sched_getaffinity(0))
        on_node = int(environ["SLURM_CPUS_ON_NODE"]) if "SLURM_CPUS_ON_NODE" in environ else cpus
        return cls(
            rank=int(environ["SLURM_PROCID"]),
            count=nodes,
            cpus=min(cpus, on_node),
            gpus=int(environ["SLURM_GPUS_ON_NODE"]) if "SLURM_GPUS_ON_NODE" in environ else None,
            memory=_memory(environ, on_node),
            address=_address_of(interface) if interface else _address_towards(environ),
        )

    def ray_options(self) -> list[str]:
        """Options of `ray start` that limit Ray to this job's share of the node."""
        options = [f"--num-cpus={self.cpus}"]
        if self.gpus is not None:
            options.append(f"--num-gpus={self.gpus}")
        if self.address is not None:
            options.append(f"--node-ip-address={self.address}")
        if self.memory is not None:
            shared = os.statvfs("/dev/shm")
            store = min(int(_OBJECT_STORE * self.memory), int(0.9 * shared.f_bavail * shared.f_frsize))
            options += [f"--memory={self.memory - store}", f"--object-store-memory={store}"]
        return options

    def environment(self) -> dict[str, str]:
        """Variables for Ray and the processes it starts. Without them gloo takes the interface that the host's name
        resolves to, which on many systems is a loopback interface."""
        if self.address is None:
            return {}
        names = [name for name, address in _addresses() if address == self.address]
        return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _memory(environ: Mapping[str, str], cpus: int) -> int | None:
    if int(environ.get("SLURM_MEM_PER_NODE") or 0):
        return int(environ["SLURM_MEM_PER_NODE"]) * MIB
    if int(environ.get("SLURM_MEM_PER_CPU") or 0):
        return int(environ["SLURM_MEM_PER_CPU"]) * cpus * MIB
    return None


def _addresses() -> list[tuple[str, str]]:
    """IPv4 addresses by interface."""
    found = psutil.net_if_addrs().items()
    return [(name, one.address) for name, all_of_it in found for one in all_of_it if one.family == socket.AF_INET]


def _address_of(interface: str) -> str:
    addresses = dict(reversed(_addresses()))
    if interface not in addresses:
        names = ", ".join(sorted(addresses))
        raise LauncherError(
            f"{socket.gethostname()} has no interface '{interface}' with an IPv4 address; it has {names}"
        )
    return addresses[interface]


def _address_towards(environ: Mapping[str, str]) -> str | None:
    """The address from which this node reaches the node of srun; None where that is unknown, or this node."""
    target = environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not target:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing.
        probe.connect((target, 9))
        own = probe.getsockname()[0]
    return None if own.startswith("127.") else own
