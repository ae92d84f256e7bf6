"""Checks the GPUs, their driver, and settings that break runs on them."""

import csv
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_rl_lite.diagnosis.check import FAIL, INSTALL, OK, SKIPPED, WARN, Check, CheckStatus, Gpu, Machine, judge
from nemo_rl_lite.diagnosis.packages import GPU, is_there, torch_cuda

LIMIT_S = 10.0
ON_GPUS = "runs on GPUs (cluster.gpus_per_node > 0); runs on CPUs work"
# The oldest driver for each major version of CUDA (NVIDIA, CUDA compatibility, table 1).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
# CUDA 13 has no code for older GPUs; bfloat16, in which policy=megatron_gpu and vLLM compute, needs the second.
OLDEST_CAPABILITY, BFLOAT16_CAPABILITY = (7, 5), (8, 0)
IDLE_MIB = 1024
"""Memory that an idle GPU may have in use."""
_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used,compute_mode,compute_cap"
# Starts CUDA without torch and prints the newest CUDA version that the driver runs, and why CUDA does not start.
PROBE = """
import ctypes
cuda, version, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.c_char_p()
cuda.cuDriverGetVersion(ctypes.byref(version))
status = cuda.cuInit(0)
cuda.cuGetErrorString(status, ctypes.byref(text))
print(version.value // 1000, f"error {status}: {(text.value or b'unknown').decode()}" if status else "", sep=",")
"""
REMEDIES = {
    "error 802": "systemctl start nvidia-fabricmanager, in the driver's version (machines with NVSwitch need it)",
    "error 80": "remove a cuda-compat package, or a folder in LD_LIBRARY_PATH, that has an older libcuda",
    "libcuda": "start the container with its GPUs (docker --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
}


def read_gpus() -> tuple[list[Gpu], str]:
    """The GPUs that nvidia-smi lists, or no GPU and its reason (empty where there is no nvidia-smi)."""
    try:
        text = _ask(f"--query-gpu={_FIELDS}")
        if text.startswith("No devices"):
            return [], text.strip()
        gpus = [_gpu(row) for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    except FileNotFoundError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi gave no answer within {LIMIT_S:g} s"
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).strip() or f"nvidia-smi ended with {error.returncode}"
        return [], said.splitlines()[0]
    except (OSError, ValueError) as error:
        return [], f"nvidia-smi gave no usable answer: {error}"
    return gpus, ""


def _ask(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def _gpu(row: Sequence[str]) -> Gpu:
    index, uuid, name, driver, total, used, mode, capability = row
    # A GPU that shares the host's memory says [N/A].
    total_mib, used_mib = (int(size) if size.isdigit() else 0 for size in (total, used))
    known = tuple(int(part) for part in capability.split(".") if part.isdigit())
    return Gpu(index, uuid, name, driver, total_mib, used_mib, mode, known)


def driver(machine: Machine) -> Iterator[Check]:
    """Check that the driver answers, is new enough for torch, and starts CUDA."""
    bad = _severity(machine)
    if not machine.gpus:
        if not machine.gpu_trouble or machine.gpu_trouble.startswith("No devices"):
            yield Check("GPUs", SKIPPED, "none here", off=ON_GPUS)
            return
        fix = "install driver 580 or newer, reload it (or reboot), or give the container its GPUs (docker --gpus all)"
        if "no answer" in machine.gpu_trouble:
            fix = "the driver hangs: look for Xid in dmesg, and reboot"
        yield Check("GPUs", bad, machine.gpu_trouble, "an answer of nvidia-smi", fix, ON_GPUS)
        return
    version, (newest, error) = machine.gpus[0].driver, start_cuda()
    built = torch_cuda()
    major = int(built.partition(".")[0] or 0)
    found = f"driver {version}" + f", CUDA up to {newest}" * bool(newest)
    if not major and is_there("torch"):
        fix = f"{INSTALL} {GPU}"
        yield Check("driver", bad, f"{found}; the torch here is for CPUs", "torch for CUDA", fix, ON_GPUS)
    else:
        wanted = f"CUDA {built}, which torch is built for" if built else ""
        fix = f"install driver {OLDEST_DRIVER.get(major, 'of a newer branch')} or newer"
        yield judge("driver", not is_too_old(version, newest, major), found, wanted, fix, ON_GPUS, bad)
    fix = next((fix for said, fix in REMEDIES.items() if said in error), "look for Xid in dmesg, and reboot")
    yield judge("CUDA", not error, f"does not start: {error}" if error else "starts", "", fix, ON_GPUS, bad)


def start_cuda() -> tuple[int, str]:
    """Start CUDA in another process: the newest major version that the driver runs (0: unknown), and why CUDA does not
    start (empty: it does)."""
    command = [sys.executable, "-I", "-c", PROBE]
    # CUDA does not start where this variable hides all GPUs, which is a line of `environment_variables`.
    shown = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(command, env=shown, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return 0, f"no answer within {LIMIT_S:g} s"
    if done.returncode:
        return 0, (done.stderr.strip().splitlines() or [f"the probe ended with status {done.returncode}"])[-1]
    version, _, error = done.stdout.strip().partition(",")
    return int(version), error


def is_too_old(driver: str, newest: int, built_for: int) -> bool:
    """Whether a driver cannot run code built for CUDA `built_for`.x: by the newest major version that it runs, which a
    package for forward compatibility raises, or where that is 0 by the driver's branch."""
    branch = driver.partition(".")[0]
    return newest < built_for if newest else branch.isdigit() and int(branch) < OLDEST_DRIVER.get(built_for, 0)


def each_gpu(machine: Machine) -> Iterator[Check]:
    """Check each GPU's capability, compute mode and free memory."""
    for gpu in machine.gpus:
        name, capability = f"GPU {gpu.index}", ".".join(map(str, gpu.capability))
        found = f"{gpu.name}, {gpu.total_mib / 1024:.1f} GiB"
        found += f", compute capability {capability}" * bool(capability)
        used = f"{gpu.used_mib / 1024:.1f} GiB in use"
        if gpu.capability and gpu.capability < OLDEST_CAPABILITY:
            yield Check(name, _severity(machine), found, "capability 7.5 or newer", "another GPU", ON_GPUS)
        elif gpu.capability and gpu.capability < BFLOAT16_CAPABILITY:
            off = "bfloat16, in which policy=megatron_gpu computes"
            yield Check(name, WARN, found, "capability 8.0 or newer", "policy.precision=float32", off)
        elif gpu.compute_mode.startswith(("Exclusive", "Prohibited")):
            wanted, fix = (
                "Default: policy and engine are two processes",
                f"nvidia-smi -i {gpu.index} -c DEFAULT (as root)",
            )
            found = f"{found}, compute mode {gpu.compute_mode}"
            yield Check(name, WARN, found, wanted, fix, "generation.colocated.enabled")
        elif gpu.used_mib > IDLE_MIB:
            fix = "end them, choose other GPUs by CUDA_VISIBLE_DEVICES, or wait"
            yield Check(name, WARN, f"{found}; {used} by {_users(gpu)}", "an idle GPU", fix, "the memory in use")
        else:
            yield Check(name, OK, f"{found}, {used}")


def _users(gpu: Gpu) -> str:
    """The processes that have memory of a GPU. Some containers and virtual machines refuse the question."""
    try:
        text = _ask("--query-compute-apps=gpu_uuid,pid,used_memory,process_name")
    except (OSError, subprocess.SubprocessError):
        text = ""
    rows = (line.split(", ", 3) for line in text.splitlines() if line.startswith(gpu.uuid))
    shown = ", ".join(f"{name} (pid {pid}, {memory} MiB)" for _, pid, memory, name in rows)
    return shown or "processes that cannot be seen from here (another container's, or another user's)"


def compiler(machine: Machine) -> Iterator[Check]:
    """Check for what Triton compiles its launchers with while a run starts."""
    if not machine.gpus:
        return
    named = os.environ.get("CC")
    found = next(filter(None, map(shutil.which, (named,) if named else ("gcc", "clang"))), None)
    # Triton looks for the headers under the same scheme: Debian's default scheme has none.
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
    """Check that no variable hides GPUs or puts other libraries before torch's."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not machine.gpus:
        return
    if visible is not None:
        named = [name.strip() for name in visible.split(",") if name.strip()]
        wrong = [name for name in named if name.isdigit() and int(name) >= len(machine.gpus)]
        fits = named not in ([], ["-1"]) and not wrong
        what = f"{len(named)} of {len(machine.gpus)} GPUs" if fits else "hides every GPU"
        what = f"names GPUs that do not exist ({', '.join(wrong)})" if wrong else what
        yield judge("CUDA_VISIBLE_DEVICES", fits, f"{visible!r}: {what}", "", "unset CUDA_VISIBLE_DEVICES", ON_GPUS)
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        libraries = (f"{name}.so*" for name in ("libnccl", "libcudnn", "libcublas"))
        found = next((file for pattern in libraries for file in Path(folder).glob(pattern)), None)
        if found is not None:
            wanted, fix = "the libraries that torch was built with", f"LD_LIBRARY_PATH without {folder}"
            off = "what the other version lacks (undefined symbols, hangs)"
            yield Check("LD_LIBRARY_PATH", WARN, f"{found} comes before torch's", wanted, fix, off)


def _severity(machine: Machine) -> CheckStatus:
    """The status of what keeps GPUs from being used: an environment for CPUs does not need them."""
    return FAIL if machine.kind == GPU else WARN


CHECKS = {"gpus": (driver, each_gpu, compiler, environment_variables)}
