"""Reads facts of GPUs without creating a CUDA context, and keeps processes away from them."""

import os
import subprocess

MIB = 2**20
# The environment of a process that computes on CPUs. It must not see GPUs: Ray does not hide them from an actor that
# asked for none. OpenMP threads sleep while they wait: beside a busy process, threads that spin take the cores that the
# others need.
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}


def gpu_bytes(command: str = "nvidia-smi") -> int | None:
    """Memory of this machine's smallest GPU in bytes; None where there is no GPU, or the driver does not say."""
    try:
        return min(int(line) for line in _of_gpus("memory.total", command)) * MIB
    except ValueError:
        return None


def gpu_count(command: str = "nvidia-smi") -> int:
    """The number of this machine's GPUs; of those that CUDA_VISIBLE_DEVICES names, where it is set."""
    there = len(_of_gpus("name", command))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([one for one in visible.split(",") if one.strip()]))


def gpu_name(command: str = "nvidia-smi") -> str | None:
    """What the driver calls this machine's GPUs; None where there is none, or they are not all of the same kind."""
    names = set(_of_gpus("name", command))
    return names.pop() if len(names) == 1 else None


def _of_gpus(fact: str, command: str) -> list[str]:
    """A fact of each of this machine's GPUs; empty where there is none."""
    query = [command, f"--query-gpu={fact}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.splitlines()]
