"""Checks the GPUs, their driver, and settings that break runs on them."""

import csv
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_rl_lite.diagnosis.check import FAIL, INSTALL, SKIPPED, WARN, Check, CheckStatus, Gpu, Machine, judge
from nemo_rl_lite.diagnosis.packages import GPU, is_there, torch_cuda

LIMIT_S = 10.0
ON_GPUS = "runs on GPUs (cluster.gpus_per_node > 0); runs on CPUs work"
NO_DEVICES = "No devices"
# CUDA 13 has no code for older GPUs; bfloat16, in which policy=megatron_gpu and vLLM compute, needs the second.
OLDEST_CAPABILITY, BFLOAT16_CAPABILITY = (7, 5), (8, 0)
OF_TORCH = ("libnccl", "libcudnn", "libcublas")
IDLE_MIB = 1024
"""Memory that an idle GPU may have in use."""
_QUERY = "--query-gpu=index,name,driver_version,memory.total,memory.used,compute_mode,compute_cap"
# Starts CUDA without torch and prints the newest CUDA version that the driver runs, and why CUDA does not start.
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


def read_gpus() -> tuple[list[Gpu], str]:
    """The GPUs that nvidia-smi lists, or no GPU and its reason (empty where there is no nvidia-smi)."""
    command = ["nvidia-smi", _QUERY, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        said = (done.stdout + done.stderr).strip() or f"nvidia-smi ended with {done.returncode}"
        if done.returncode or said.startswith(NO_DEVICES):
            return [], said.splitlines()[0]
        return [_gpu(row) for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row], ""
    except FileNotFoundError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi gave no answer within {LIMIT_S:g} s"
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
        # A driver that does not say what it runs is not blamed for it.
        fits = not newest or newest >= int(built.partition(".")[0] or 0)
        yield judge("driver", fits, found, wanted, "install a newer driver (580 for CUDA 13)", ON_GPUS, bad)
    fix = next((fix for said, fix in REMEDIES.items() if said in error), LOOK_IN_DMESG)
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


def each_gpu(machine: Machine) -> Iterator[Check]:
    """Check each GPU's capability, compute mode and free memory."""
    for gpu in machine.gpus:
        name, capability = f"GPU {gpu.index}", ".".join(map(str, gpu.capability))
        found = f"{gpu.name}, {gpu.total_mib / 1024:.1f} GiB"
        found += f", compute capability {capability}" * bool(capability)
        if gpu.capability and gpu.capability < OLDEST_CAPABILITY:
            yield Check(name, _severity(machine), found, "capability 7.5 or newer", "another GPU", ON_GPUS)
        elif gpu.capability and gpu.capability < BFLOAT16_CAPABILITY:
            off = "bfloat16, in which policy=megatron_gpu computes"
            yield Check(name, WARN, found, "capability 8.0 or newer", "policy.precision=float32", off)
        elif gpu.compute_mode.startswith(("Exclusive", "Prohibited")):
            found += f", compute mode {gpu.compute_mode}"
            wanted, fix = "Default: policy and engine are two processes", f"nvidia-smi -i {gpu.index} -c DEFAULT (root)"
            yield Check(name, WARN, found, wanted, fix, "generation.colocated.enabled")
        else:
            fix = "end what uses it (nvidia-smi lists processes), choose others by CUDA_VISIBLE_DEVICES, or wait"
            found += f", {gpu.used_mib / 1024:.1f} GiB in use"
            yield judge(name, gpu.used_mib <= IDLE_MIB, found, "an idle GPU", fix, "the memory in use")


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
            off = "what the other version lacks (undefined symbols, hangs)"
            yield Check("LD_LIBRARY_PATH", WARN, f"{found[0]} comes before torch's", wanted, fix, off)


def _severity(machine: Machine) -> CheckStatus:
    """The status of what keeps GPUs from being used: an environment for CPUs does not need them."""
    return FAIL if machine.kind == GPU else WARN


CHECKS = {"gpus": (driver, each_gpu, compiler, environment_variables)}
