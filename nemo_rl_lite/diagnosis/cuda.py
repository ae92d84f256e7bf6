"""CUDA itself: whether it starts here, and whether the driver is new enough for torch."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# The oldest driver for each major version of CUDA (NVIDIA, CUDA compatibility, table 1).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
PROBE_LIMIT_S = 15.0
_REBOOT = "look for Xid in dmesg; reload the driver, or reboot"


@dataclass(frozen=True)
class Cuda:
    """What the driver says when CUDA starts."""

    version: tuple[int, int]
    """The newest CUDA that it knows; (0, 0) where it does not tell."""
    error: str
    peers: tuple[tuple[bool, ...], ...]
    """For each GPU, whether it may read each GPU's memory."""


@cache
def start_cuda() -> Cuda:
    """Start CUDA in a process of its own, which sees all GPUs."""
    script = Path(__file__).with_name("cuda_probe.py")
    # In nvidia-smi's order, and none hidden.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    command = [sys.executable, "-I", str(script)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Cuda((0, 0), f"no answer within {PROBE_LIMIT_S:g} s", ())
    return parse_probe(done.stdout, done.returncode)


def parse_probe(text: str, status: int) -> Cuda:
    """What cuda_probe.py printed before it ended with `status`."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return Cuda((0, 0), f"the process that tried ended with status {status}", ())
    major, rest = divmod(answer["version"], 1000)
    return Cuda((major, rest // 10), answer["error"], tuple(tuple(row) for row in answer["peers"]))


def is_too_old(driver: str, cuda: tuple[int, int], built_for: int) -> bool:
    """Whether a driver cannot run code built for CUDA `built_for`.x, whatever the minor version: by the version it
    tells itself, or, where it did not, by its branch."""
    if cuda[0]:
        return cuda[0] < built_for
    branch = driver.partition(".")[0]
    return branch.isdigit() and int(branch) < OLDEST_DRIVER.get(built_for, 0)


def remedy(error: str) -> str:
    """What to do about CUDA's reason for not starting."""
    if error.startswith("error 802"):
        return "systemctl start nvidia-fabricmanager, of the driver's version (machines with NVSwitch need it)"
    if error.startswith(("error 803", "error 804")):
        return "another libcuda comes before the driver's: a cuda-compat package, or a folder in LD_LIBRARY_PATH"
    if "libcuda" in error:
        return "start the container with its GPUs (docker --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    return _REBOOT
