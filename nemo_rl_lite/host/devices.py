"""Reads facts of GPUs without creating a CUDA context."""

import subprocess

MIB = 2**20


def gpu_bytes(command: str = "nvidia-smi") -> int | None:
    """Memory of this machine's smallest GPU in bytes; None where there is no GPU, or the driver does not say."""
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in answer.splitlines()) * MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
