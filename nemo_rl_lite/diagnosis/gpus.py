"""GPUs: driver, memory, links between them, the CPUs beside them, and settings that spoil them."""

import shutil
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

from nemo_rl_lite.diagnosis.check import Check, Examination, Machine, Status
from nemo_rl_lite.diagnosis.cuda import OLDEST_DRIVER, is_too_old, remedy, start_cuda
from nemo_rl_lite.diagnosis.packages import GPU, is_there, torch_cuda
from nemo_rl_lite.diagnosis.smi import Gpu
from nemo_rl_lite.host.numa import NoNodeError, node_of

ON_GPUS = "runs on GPUs (cluster.gpus_per_node > 0); runs on CPUs work"
# CUDA 13 has no code for older ones; bfloat16, which policy=megatron_gpu and vLLM compute in, begins at the second.
OLDEST_CAPABILITY, BFLOAT16_CAPABILITY = (7, 5), (8, 0)
# What an idle GPU may have in use.
IDLE_MIB = 1024
INSTALL_GPU = f"bash scripts/install.sh {GPU}"
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")


def driver(machine: Machine) -> Iterator[Check]:
    """The driver, and whether CUDA starts with it."""
    gpus = machine.gpus.gpus
    if not gpus:
        yield _no_gpu(machine)
        return
    cuda, built = start_cuda(), torch_cuda()
    found = f"driver {gpus[0].driver}" + (
        f", CUDA up to {cuda.version[0]}.{cuda.version[1]}" if cuda.version[0] else ""
    )
    major = int(built.partition(".")[0] or 0)
    bad = _severity(machine)
    if not major and is_there("torch"):
        yield Check("driver", bad, f"{found}; the torch here is for CPUs", "torch for CUDA", INSTALL_GPU, ON_GPUS)
    elif is_too_old(gpus[0].driver, cuda.version, major):
        fix = f"install driver {OLDEST_DRIVER.get(major, 'of a newer branch')} or newer"
        yield Check("driver", bad, found, f"CUDA {built}, which torch is built for", fix, ON_GPUS)
    else:
        yield Check("driver", Status.OK, found, f"CUDA {built}, which torch is built for" if built else "")
    if cuda.error:
        found = f"does not start: {cuda.error}"
        yield Check("CUDA", bad, found, fix=remedy(cuda.error), off=ON_GPUS)
    elif len(cuda.peers) < len(gpus):
        found = f"starts, but sees {len(cuda.peers)} of {len(gpus)} GPUs"
        fix = "give the container or job its GPUs; switch MIG off (nvidia-smi -mig 0, as root)"
        yield Check("CUDA", Status.WARN, found, "all of them", fix, "the others")
    else:
        yield Check("CUDA", Status.OK, "starts")


def each_gpu(machine: Machine) -> Iterator[Check]:
    for gpu in machine.gpus.gpus:
        yield _gpu(machine, gpu)


def links(machine: Machine) -> Iterator[Check]:
    """Whether GPUs reach each other's memory, and through what."""
    gpus = machine.gpus.gpus
    if len(gpus) < 2:
        return
    kinds = Counter(machine.gpus.links.values())
    found = ", ".join(f"{count} pair{'s' * (count > 1)} by {kind}" for kind, count in kinds.most_common())
    found = found or "nvidia-smi does not tell"
    peers = start_cuda().peers
    apart = [pair for pair in combinations(range(len(peers)), 2) if not peers[pair[0]][pair[1]]]
    if apart:
        shown = ", ".join(f"{one}-{other}" for one, other in apart[:4]) + (", ..." if len(apart) > 4 else "")
        found = f"{found}; GPUs {shown} cannot read each other's memory"
        fix = (
            "IOMMU and PCIe ACS off, or pass NVSwitch and all GPUs to the virtual machine; else keep engines at one GPU"
        )
        off = "fast tensor parallelism and refits between GPUs: they go through host memory"
        yield Check("links", Status.WARN, found, "peer access between all GPUs", fix, off)
    elif kinds and not all(kind.startswith("NV") for kind in kinds):
        yield Check("links", Status.OK, f"{found}; tensor parallelism is slower without NVLink", "NVLink")
    else:
        yield Check("links", Status.OK, found)


def numa(machine: Machine) -> Iterator[Check]:
    """The NUMA node of each GPU, and whether this process may use its CPUs."""
    sysfs = machine.system / "sys"
    nodes = len(list((sysfs / "devices/system/node").glob("node[0-9]*")))
    placed: list[str] = []
    troubles: list[str] = []
    for gpu in machine.gpus.gpus:
        try:
            node, cpus = node_of(gpu.bus_id, sysfs)
            placed.append(f"GPU {gpu.index} on node {node} ({len(cpus)} CPUs)")
        except NoNodeError as error:
            troubles.append(str(error))
    if not machine.gpus.gpus:
        return
    if troubles and nodes > 1:
        fix = "give the job the CPUs beside its GPUs (Slurm: --gpu-bind=closest; docker: --cpuset-cpus)"
        off = "cluster.numa_binding: copies to and from the host may cross sockets"
        yield Check("NUMA", Status.WARN, "; ".join(placed + troubles), "CPUs beside each GPU", fix, off)
    else:
        yield Check("NUMA", Status.OK, "; ".join(placed) or "one node")


def compiler(machine: Machine) -> Iterator[Check]:
    """Triton compiles its launchers while a run starts."""
    if not machine.gpus.gpus:
        yield Check("C compiler", Status.SKIPPED, "only runs on GPUs compile while they start")
        return
    named = machine.environment.get("CC")
    names = (named,) if named else ("gcc", "clang")
    found = next((path for name in names if (path := shutil.which(name, path=machine.environment.get("PATH")))), None)
    # As Triton looks for them: Debian's own scheme has no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    off = "Triton, and so vLLM and checksums on GPUs"
    if found is None:
        wanted = "gcc or clang on PATH" + (f"; CC={named} is not there" if named else "")
        yield Check("C compiler", _severity(machine), "none", wanted, "apt-get install gcc, or CC=...", off)
    elif not headers.is_file():
        fix = "apt-get install python3.12-dev, or a Python that brings its headers (uv, pyenv)"
        yield Check("C compiler", _severity(machine), f"{found}, but no {headers}", "Python's headers", fix, off)
    else:
        yield Check("C compiler", Status.OK, found)


def settings(machine: Machine) -> Iterator[Check]:
    """Environment variables that spoil runs on GPUs."""
    if not machine.gpus.gpus:
        return
    traps = list(_traps(machine.environment, len(machine.gpus.gpus)))
    yield from traps
    if not traps:
        yield Check("environment variables", Status.OK, "none that is known to spoil runs on GPUs")


def _severity(machine: Machine) -> Status:
    """Of what keeps GPUs from being used: an environment for CPUs does without."""
    return Status.FAIL if machine.kind == GPU else Status.WARN


def _no_gpu(machine: Machine) -> Check:
    """Without an answer of nvidia-smi, a GPU may still be seen on the PCI bus."""
    trouble = machine.gpus.trouble
    cards = [
        device
        for device in (machine.system / "sys/bus/pci/devices").glob("*")
        if _says(device / "vendor") == _NVIDIA and _says(device / "class")[:6] in _DISPLAY_CLASSES
    ]
    if not cards and (not trouble or trouble.startswith("No devices")):
        return Check("GPUs", Status.SKIPPED, "none here", off=ON_GPUS)
    found = trouble or "no nvidia-smi"
    if cards:
        found = f"{len(cards)} NVIDIA GPU{'s' * (len(cards) > 1)} on the PCI bus, but {found}"
    fix = "install NVIDIA's driver, reload it (or reboot), or give the container its GPUs (docker --gpus all)"
    if "no answer" in trouble:
        fix = "the driver hangs: look for Xid in dmesg, and reboot"
    return Check("GPUs", _severity(machine), found, "an answer of nvidia-smi", fix, ON_GPUS)


def _gpu(machine: Machine, gpu: Gpu) -> Check:
    name, capability = f"GPU {gpu.index}", gpu.capability
    shown = f", compute capability {capability[0]}.{capability[1]}" if capability else ""
    found = f"{gpu.name}, {gpu.total_mib / 1024:.1f} GiB{shown}"
    if capability and capability < OLDEST_CAPABILITY:
        wanted = "7.5 or newer: CUDA 13 has no code for older ones"
        return Check(name, _severity(machine), found, wanted, "another GPU", ON_GPUS)
    if capability and capability < BFLOAT16_CAPABILITY:
        off = "bfloat16, which policy=megatron_gpu computes in"
        return Check(name, Status.WARN, found, "8.0 or newer", "policy.precision=float32", off)
    if gpu.compute_mode.startswith(("Exclusive", "Prohibited")):
        fix = f"nvidia-smi -i {gpu.index} -c DEFAULT (as root)"
        wanted = "Default: policy and engine are two processes on it"
        off = "generation.colocated.enabled"
        return Check(name, Status.WARN, f"{found}, compute mode {gpu.compute_mode}", wanted, fix, off)
    if gpu.used_mib > IDLE_MIB:
        holders = [one for one in machine.gpus.processes if one.uuid == gpu.uuid]
        who = ", ".join(f"{one.name} (pid {one.pid}, {one.memory} MiB)" for one in holders)
        who = who or "processes that cannot be seen from here (another container's, or another user's)"
        found = f"{found}; {gpu.used_mib / 1024:.1f} GiB in use by {who}"
        fix = "end them, choose other GPUs by CUDA_VISIBLE_DEVICES, or wait"
        return Check(name, Status.WARN, found, "nothing in use", fix, "the share of the GPU that is in use")
    return Check(name, Status.OK, f"{found}, {gpu.used_mib / 1024:.1f} GiB in use")


def _traps(environment: Mapping[str, str], gpus: int) -> Iterator[Check]:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name for name in visible.split(",") if name.strip()]
        wrong = [name for name in named if name.strip().isdigit() and int(name) >= gpus]
        if not named or named == ["-1"] or wrong:
            why = f"names GPUs that are not there ({', '.join(wrong)})" if wrong else "hides every GPU"
            found, fix = f"CUDA_VISIBLE_DEVICES={visible!r} {why}", "unset CUDA_VISIBLE_DEVICES"
            yield Check("CUDA_VISIBLE_DEVICES", Status.WARN, found, fix=fix, off=ON_GPUS)
        else:
            yield Check("CUDA_VISIBLE_DEVICES", Status.OK, f"{visible}: {len(named)} of {gpus} GPUs")
    for name, off in _SLOW_WHERE_SET.items():
        if environment.get(name, "0") not in ("0", ""):
            yield Check(name, Status.WARN, f"{name}={environment[name]}", "not set", f"unset {name}", off)
    for folder in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        for library in ("libnccl.so", "libcudnn.so", "libcublas.so"):
            if found := next(Path(folder).glob(f"{library}*"), None):
                wanted, fix = "torch's own, which it was built with", f"LD_LIBRARY_PATH without {folder}"
                off = "whatever the other version lacks (undefined symbols, hangs)"
                yield Check("LD_LIBRARY_PATH", Status.WARN, f"{found} comes before torch's", wanted, fix, off)


_SLOW_WHERE_SET = {
    "NCCL_P2P_DISABLE": "direct copies between GPUs: NCCL goes through host memory",
    "NCCL_SHM_DISABLE": "NCCL's shared memory within a node: it goes through sockets where GPUs have no peer access",
    "NCCL_IB_DISABLE": "InfiniBand between nodes: NCCL uses TCP",
    "CUDA_LAUNCH_BLOCKING": "kernels beside each other, and so copies beside computation",
}


def _says(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


EXAMINATIONS = (
    Examination("gpus", "driver", driver),
    Examination("gpus", "GPUs", each_gpu),
    Examination("gpus", "links", links),
    Examination("gpus", "NUMA", numa),
    Examination("gpus", "C compiler", compiler),
    Examination("gpus", "environment variables", settings),
)
