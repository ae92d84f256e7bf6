"""Reads facts of GPUs without creating a CUDA context, and keeps processes away from them."""

import subprocess

MIB = 2**20
# The environment of a process that computes on CPUs. It must not see GPUs: Ray does not hide them from an actor that
# asked for none. OpenMP threads sleep while they wait: beside a busy process, threads that spin take the cores that the
# others need (measured: docs/benchmarks/).
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}


def gpu_bytes(command: str = "nvidia-smi") -> int | None:
    """Memory of this machine's smallest GPU in bytes; None where there is no GPU, or the driver does not say."""
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in answer.splitlines()) * MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
