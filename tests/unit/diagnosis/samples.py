"""Answers of nvidia-smi as it writes them."""

from pathlib import Path

H100 = (
    "0, GPU-5a7f7f4e-3c1b-9c6e-2f0d-6f0e6f6f0a11, NVIDIA H100 80GB HBM3, 00000000:3B:00.0, 580.159.04, "
    "81559, 4, Default, 9.0\n"
)
H200_X4 = "".join(
    f"{index}, GPU-{index}0000000-0000-0000-0000-00000000000{index}, NVIDIA H200, 00000000:{bus}:00.0, 580.159.04, "
    f"143771, {used}, Default, 9.0\n"
    for index, (bus, used) in enumerate([("19", 4), ("3B", 4), ("9B", 70123), ("BB", 4)])
)
H200_PROCESSES = (
    "GPU-20000000-0000-0000-0000-000000000002, 4242, /usr/bin/python3, 69800\n"
    "GPU-20000000-0000-0000-0000-000000000002, 4243, python -c a, b, [N/A]\n"
)
# With network cards between the GPUs and the affinities, and the escapes that underline the header.
H200_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-47,96-143\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t48-95,144-191\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t48-95,144-191\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPIX\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
PCIE_TOPOLOGY = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPHB\t0-63\t0\t\tN/A
GPU1\tPHB\t X \t0-63\t0\t\tN/A
"""
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159\n"
OLD_FIELD = 'Field "compute_cap" is not a valid field to query.\n\n'
OLD_DRIVER = (
    "0, GPU-00000000-0000-0000-0000-000000000000, NVIDIA A100-SXM4-80GB, 00000000:07:00.0, 470.182.03, "
    "81251, 3, Default\n"
)


def smi(folder: Path, script: str) -> str:
    """A command that answers as the shell script says: `$1` is the question."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def answering(folder: Path, gpus: str, processes: str = "", topology: str = "") -> str:
    """A command that gives these answers."""
    for name, text in (("gpus", gpus), ("processes", processes), ("topology", topology)):
        (folder / name).write_text(text)
    cases = [f"--query-gpu*) cat {folder}/gpus", f"--query-compute-apps*) cat {folder}/processes"]
    cases.append(f"topo) cat {folder}/topology")
    return smi(folder, f'case "$1" in\n{" ;;\n".join(cases)} ;;\n*) exit 2 ;;\nesac')
