import subprocess
from dataclasses import replace

import pytest

from nemo_rl_lite.diagnosis import gpus
from nemo_rl_lite.diagnosis.check import CheckStatus
from nemo_rl_lite.diagnosis.gpus import read_gpus
from tests.unit.diagnosis import samples
from tests.unit.diagnosis.samples import H100

OK, WARN, FAIL, SKIPPED = CheckStatus


@pytest.fixture
def smi_folder(tmp_path, monkeypatch):
    """An empty folder that comes first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.fixture
def cuda(monkeypatch):
    """Sets what starting CUDA gives, and what torch was built for."""

    def set_to(newest=13, error="", built="13.0"):
        monkeypatch.setattr(gpus, "start_cuda", lambda: (newest, error))
        monkeypatch.setattr(gpus, "torch_cuda", lambda: built)

    return set_to


def test_four_gpus_of_which_one_is_in_use(smi_folder, machine):
    samples.answering(smi_folder, samples.H200_X4)
    found, trouble = read_gpus()
    assert trouble == "" and [gpu.index for gpu in found] == ["0", "1", "2", "3"]
    assert (found[0].name, found[0].driver, found[0].total_mib, found[0].capability) == (
        "NVIDIA H200",
        "580.159.04",
        143771,
        (9, 0),
    )
    idle, _, used, _ = gpus.each_gpu(machine(found, kind="gpu"))
    assert (idle.status, idle.found) == (OK, "NVIDIA H200, 140.4 GiB, compute capability 9.0, 0.0 GiB in use")
    assert used.status is WARN
    assert "68.5 GiB in use" in used.found and "nvidia-smi lists processes" in used.fix


@pytest.mark.parametrize(
    ("said", "status", "trouble"),
    [
        (samples.NO_DRIVER, 9, "couldn't communicate with the NVIDIA driver"),
        (samples.MISMATCH, 18, "Driver/library version mismatch"),
        (samples.OLD_FIELD, 2, "compute_cap"),
        ("No devices were found\n", 6, "No devices were found"),
        ("No devices were found\n", 0, "No devices were found"),
        ("", 1, "ended with 1"),
        ("something else entirely\n", 0, "no usable answer"),
    ],
)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_driver_in_trouble(smi_folder, machine, said, status, trouble, kind):
    (smi_folder / "said").write_text(said)
    samples.smi(smi_folder, f"cat {smi_folder}/said; exit {status}")
    found, why = read_gpus()
    assert found == [] and trouble in why
    (check,) = gpus.driver(machine([], why, kind))
    bad = FAIL if kind == "gpu" else WARN
    assert check.status is (SKIPPED if trouble.startswith("No devices") else bad)


def test_a_driver_that_hangs(smi_folder, machine, monkeypatch):
    samples.smi(smi_folder, "exec sleep 60")
    monkeypatch.setattr(gpus, "LIMIT_S", 0.3)
    found, why = read_gpus()
    assert found == [] and why == "nvidia-smi gave no answer within 0.3 s"
    assert "dmesg" in next(gpus.driver(machine([], why))).fix


def test_no_gpu_is_no_failure(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() == ([], "")
    (check,) = gpus.driver(machine())
    assert check.status is SKIPPED and "gpus_per_node" in check.off
    for look in (gpus.each_gpu, gpus.compiler, gpus.environment_variables):
        assert list(look(machine())) == []


def test_a_gpu_without_memory_of_its_own(smi_folder):
    samples.answering(smi_folder, "0, NVIDIA Thor, 580.00, [N/A], [N/A], Default, 11.0\n")
    ((gpu,), _) = read_gpus()
    assert (gpu.total_mib, gpu.used_mib, gpu.capability) == (0, 0, (11, 0))


def test_a_driver_that_fits(machine, cuda):
    cuda()
    driver, starts = gpus.driver(machine([H100], kind="gpu"))
    assert (driver.status, driver.found) == (OK, "driver 580.159.04, CUDA up to 13")
    assert (starts.status, starts.found) == (OK, "starts")


def test_a_driver_that_is_too_old(machine, cuda):
    cuda(newest=11)
    driver, _ = gpus.driver(machine([H100], kind="gpu"))
    assert driver.status is FAIL and driver.found == "driver 580.159.04, CUDA up to 11"
    assert driver.wanted == "CUDA 13.0, which torch is built for" and "580" in driver.fix
    assert next(gpus.driver(machine([H100]))).status is WARN


def test_a_torch_for_cpus_on_gpus(machine, cuda, monkeypatch):
    cuda(built="")
    monkeypatch.setattr(gpus, "is_there", lambda name: True)
    assert next(gpus.driver(machine([H100], kind="gpu"))).status is FAIL
    monkeypatch.setattr(gpus, "is_there", lambda name: False)
    assert next(gpus.driver(machine([H100], kind="gpu"))).status is OK


def test_cuda_that_does_not_start(machine, cuda):
    cuda(error="error 802: system not yet initialized")
    _, starts = gpus.driver(machine([H100], kind="gpu"))
    assert starts.status is FAIL and "fabricmanager" in starts.fix


@pytest.mark.parametrize(("newest", "built", "status"), [(13, "12.8", OK), (12, "13.0", FAIL), (0, "13.0", OK)])
def test_which_driver_is_too_old(machine, cuda, newest, built, status):
    cuda(newest, built=built)
    assert next(gpus.driver(machine([H100], kind="gpu"))).status is status


def test_the_probe_runs(machine):
    newest, error = gpus.start_cuda()
    assert newest > 10 or "libcuda" in error


def test_a_probe_that_hangs(monkeypatch):
    def hang(*_, **keywords):
        raise subprocess.TimeoutExpired("probe", keywords["timeout"])

    monkeypatch.setattr(gpus.subprocess, "run", hang)
    assert "no answer" in gpus.start_cuda()[1]


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"capability": (7, 0)}, FAIL, "7.5 or newer"),
        ({"capability": (7, 5)}, WARN, "8.0 or newer"),
        ({"capability": ()}, OK, ""),
        ({"compute_mode": "Exclusive_Process"}, WARN, "two processes"),
    ],
)
def test_gpus_that_do_not_suit(machine, change, status, said):
    (check,) = gpus.each_gpu(machine([replace(H100, **change)], kind="gpu"))
    assert check.status is status and said in check.wanted


def test_the_compiler(machine, tmp_path, monkeypatch):
    here = machine([H100], kind="gpu", PATH=str(tmp_path))
    (check,) = gpus.compiler(here)
    assert check.status is FAIL and "gcc" in check.fix
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setattr(gpus.sysconfig, "get_path", lambda *_: str(tmp_path))
    (check,) = gpus.compiler(here)
    assert check.status is FAIL and "Python.h" in check.found
    (tmp_path / "Python.h").write_text("")
    (check,) = gpus.compiler(here)
    assert (check.status, check.found) == (OK, str(tmp_path / "gcc"))
    monkeypatch.setenv("CC", "icx")
    (check,) = gpus.compiler(here)
    assert check.status is FAIL and "CC=icx does not exist" in check.wanted


@pytest.mark.parametrize(
    ("visible", "status", "said"),
    [
        ("", WARN, "hides every GPU"),
        ("-1", WARN, "hides every GPU"),
        ("0,7", WARN, "names GPUs that do not exist (7)"),
        ("0", OK, "1 of 1 GPUs"),
        ("GPU-5a7f", OK, "1 of 1 GPUs"),
    ],
)
def test_visible_gpus(machine, visible, status, said):
    (check,) = gpus.environment_variables(machine([H100], CUDA_VISIBLE_DEVICES=visible))
    assert check.status is status and said in check.found


def test_libraries_that_come_before_those_of_torch(machine, tmp_path):
    assert list(gpus.environment_variables(machine([H100]))) == []
    (tmp_path / "libnccl.so.2").write_text("")
    (check,) = gpus.environment_variables(machine([H100], LD_LIBRARY_PATH=f"/nowhere:{tmp_path}:"))
    assert check.status is WARN and str(tmp_path / "libnccl.so.2") in check.found
