"""Answers of nvidia-smi as it writes them."""

from pathlib import Path

from nemo_rl_lite.diagnosis.check import Gpu

H200_X4 = "".join(
    f"{index}, NVIDIA H200, 580.159.04, 143771, {used}, Default, 9.0\n" for index, used in enumerate([4, 4, 70123, 4])
)
H100 = Gpu("0", "NVIDIA H100 80GB HBM3", "580.159.04", 81559, 4, "Default", (9, 0))
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)


def smi(folder: Path, script: str) -> None:
    """A command that does what the shell script says."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def answering(folder: Path, gpus: str) -> None:
    """A command that gives this answer."""
    (folder / "gpus").write_text(gpus)
    smi(folder, f"cat {folder}/gpus")
