"""Answers of nvidia-smi as it writes them."""

from pathlib import Path

from nemo_rl_lite.diagnosis.check import Gpu

H200_X4 = "".join(
    f"{index}, GPU-{index}0000000-0000-0000-0000-00000000000{index}, NVIDIA H200, 580.159.04, "
    f"143771, {used}, Default, 9.0\n"
    for index, used in enumerate([4, 4, 70123, 4])
)
H200_PROCESSES = (
    "GPU-20000000-0000-0000-0000-000000000002, 4242, 69800, /usr/bin/python3\n"
    "GPU-20000000-0000-0000-0000-000000000002, 4243, [N/A], python -c a, b\n"
)
H100 = Gpu("0", "GPU-5a7f7f4e", "NVIDIA H100 80GB HBM3", "580.159.04", 81559, 4, "Default", (9, 0))
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159\n"
OLD_FIELD = 'Field "compute_cap" is not a valid field to query.\n\n'


def smi(folder: Path, script: str) -> None:
    """A command that answers as the shell script says: `$1` is the question."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def answering(folder: Path, gpus: str, processes: str = "") -> None:
    """A command that gives these answers."""
    (folder / "gpus").write_text(gpus)
    (folder / "processes").write_text(processes)
    smi(
        folder,
        f'case "$1" in\n--query-gpu*) cat {folder}/gpus ;;\n--query-compute-apps*) cat {folder}/processes ;;\n'
        "*) exit 2 ;;\nesac",
    )
