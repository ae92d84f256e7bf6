import subprocess
from dataclasses import replace

import pytest

from nemo_rl_lite.diagnosis import cuda as cuda_module
from nemo_rl_lite.diagnosis import gpus
from nemo_rl_lite.diagnosis.check import Status
from nemo_rl_lite.diagnosis.cuda import Cuda, is_too_old, parse_probe, remedy
from nemo_rl_lite.diagnosis.smi import GpuAnswer, parse_gpus, parse_links, parse_processes
from tests.unit.diagnosis import samples

H100 = GpuAnswer(parse_gpus(samples.H100))
OLD = GpuAnswer(parse_gpus(samples.OLD_DRIVER))
H200_X4 = GpuAnswer(
    parse_gpus(samples.H200_X4), parse_processes(samples.H200_PROCESSES), parse_links(samples.H200_TOPOLOGY)
)
ALL_PEERS = ((True,) * 4,) * 4


@pytest.fixture
def cuda(monkeypatch):
    """Sets what starting CUDA gives, and what torch was built for."""

    def set_to(version=(13, 0), error="", peers=((True,),), built="13.0"):
        monkeypatch.setattr(gpus, "start_cuda", lambda: Cuda(version, error, peers))
        monkeypatch.setattr(gpus, "torch_cuda", lambda: built)

    return set_to


def test_no_gpu_is_no_failure(machine):
    for look in (gpus.driver, gpus.each_gpu, gpus.links, gpus.numa, gpus.compiler, gpus.settings):
        assert all(check.status is Status.SKIPPED for check in look(machine(NCCL_P2P_DISABLE="1")))
    (check,) = gpus.driver(machine())
    assert "gpus_per_node" in check.off


def test_a_card_without_its_driver(machine):
    here = machine(kind="gpu")
    card = here.system / "sys/bus/pci/devices/0000:3b:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    (check,) = gpus.driver(here)
    assert (check.status, check.found) == (Status.FAIL, "1 NVIDIA GPU on the PCI bus, but no nvidia-smi")
    assert next(gpus.driver(replace(here, kind="cpu"))).status is Status.WARN
    # NVIDIA's switches and audio functions are no GPUs.
    (card / "class").write_text("0x068000\n")
    assert next(gpus.driver(here)).status is Status.SKIPPED


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_driver_in_trouble(machine, kind):
    (check,) = gpus.driver(machine(GpuAnswer(trouble="Failed to initialize NVML: Unknown Error"), kind))
    assert check.status is (Status.FAIL if kind == "gpu" else Status.WARN)
    (check,) = gpus.driver(machine(GpuAnswer(trouble="nvidia-smi gave no answer within 10 s"), kind))
    assert "dmesg" in check.fix


def test_a_driver_that_fits(machine, cuda):
    cuda()
    driver, starts = gpus.driver(machine(H100, "gpu"))
    assert (driver.status, driver.found) == (Status.OK, "driver 580.159.04, CUDA up to 13.0")
    assert starts.status is Status.OK


def test_a_driver_that_is_too_old(machine, cuda):
    cuda(version=(11, 4))
    driver, _ = gpus.driver(machine(OLD, "gpu"))
    assert driver.status is Status.FAIL and driver.found == "driver 470.182.03, CUDA up to 11.4"
    assert driver.wanted == "CUDA 13.0, which torch is built for" and "580" in driver.fix
    assert next(gpus.driver(machine(OLD, "cpu"))).status is Status.WARN


def test_a_torch_for_cpus_on_gpus(machine, cuda, monkeypatch):
    cuda(built="")
    monkeypatch.setattr(gpus, "is_there", lambda name: True)
    assert next(gpus.driver(machine(H100, "gpu"))).status is Status.FAIL
    monkeypatch.setattr(gpus, "is_there", lambda name: False)
    assert next(gpus.driver(machine(H100, "gpu"))).status is Status.OK


def test_cuda_that_does_not_start_or_sees_less(machine, cuda):
    cuda(error="error 802: system not yet initialized", peers=())
    _, starts = gpus.driver(machine(H200_X4, "gpu"))
    assert starts.status is Status.FAIL and "fabricmanager" in starts.fix
    cuda(peers=((True,),))
    _, starts = gpus.driver(machine(H200_X4, "gpu"))
    assert (starts.status, starts.found) == (Status.WARN, "starts, but sees 1 of 4 GPUs")


@pytest.mark.parametrize(
    ("driver", "version", "built", "old"),
    [
        ("580.159.04", (13, 0), 13, False),
        ("570.133.07", (12, 8), 13, True),
        # A package for forward compatibility lets an old driver run new code.
        ("550.54.15", (13, 0), 13, False),
        ("570.133.07", (0, 0), 13, True),
        ("580.65.06", (0, 0), 13, False),
        ("590.1", (13, 1), 12, False),
        ("470.1", (0, 0), 0, False),
    ],
)
def test_which_driver_is_too_old(driver, version, built, old):
    assert is_too_old(driver, version, built) is old


def test_what_the_probe_prints():
    assert parse_probe('{"version": 12080, "error": "", "peers": [[true, false], [false, true]]}', 0) == Cuda(
        (12, 8), "", ((True, False), (False, True))
    )
    assert "status -11" in parse_probe("", -11).error


def test_the_probe_runs_without_a_gpu():
    cuda_module.start_cuda.cache_clear()
    started = cuda_module.start_cuda()
    if started.error:
        assert started.peers == () and remedy(started.error)
    else:
        assert len(started.peers) >= 1


def test_a_probe_that_hangs(monkeypatch):
    def hang(*_, **keywords):
        raise subprocess.TimeoutExpired("probe", keywords["timeout"])

    cuda_module.start_cuda.cache_clear()
    monkeypatch.setattr(cuda_module.subprocess, "run", hang)
    assert "no answer" in cuda_module.start_cuda().error
    cuda_module.start_cuda.cache_clear()


def test_gpus_and_who_uses_them(machine):
    idle, _, used, _ = gpus.each_gpu(machine(H200_X4, "gpu"))
    assert (idle.status, idle.found) == (
        Status.OK,
        "NVIDIA H200, 140.4 GiB, compute capability 9.0, 0.0 GiB in use",
    )
    assert used.status is Status.WARN
    assert "68.5 GiB in use by /usr/bin/python3 (pid 4242, 69800 MiB), python -c a, b (pid 4243" in used.found
    unseen = replace(H200_X4, processes=())
    assert "cannot be seen from here" in list(gpus.each_gpu(machine(unseen, "gpu")))[2].found


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"capability": (7, 0)}, Status.FAIL, "7.5 or newer"),
        ({"capability": (7, 5)}, Status.WARN, "8.0 or newer"),
        ({"capability": None}, Status.OK, ""),
        ({"compute_mode": "Exclusive_Process"}, Status.WARN, "two processes"),
    ],
)
def test_gpus_that_do_not_suit(machine, change, status, said):
    answer = GpuAnswer((replace(H100.gpus[0], **change),))
    (check,) = gpus.each_gpu(machine(answer, "gpu"))
    assert check.status is status and said in check.wanted


def test_links(machine, cuda):
    cuda(peers=ALL_PEERS)
    (check,) = gpus.links(machine(H200_X4, "gpu"))
    assert (check.status, check.found) == (Status.OK, "6 pairs by NV18")
    over_pcie = replace(H200_X4, links={(0, 1): "NV4", (0, 2): "SYS"})
    (check,) = gpus.links(machine(over_pcie, "gpu"))
    assert check.status is Status.OK and "without NVLink" in check.found
    cuda(peers=((True, False, True, True), (False, True, True, True), *ALL_PEERS[2:]))
    (check,) = gpus.links(machine(H200_X4, "gpu"))
    assert check.status is Status.WARN and "GPUs 0-1 cannot read each other's memory" in check.found
    assert list(gpus.links(machine(H100, "gpu"))) == []


def test_numa_nodes(machine, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    here = machine(H200_X4, "gpu")
    sysfs = here.system / "sys"
    for gpu, node in zip(H200_X4.gpus, (0, 0, 1, 1), strict=True):
        (sysfs / "bus/pci/devices" / gpu.bus_id).mkdir(parents=True)
        (sysfs / "bus/pci/devices" / gpu.bus_id / "numa_node").write_text(f"{node}\n")
    for node, cpus in enumerate(("0-1", "2-3")):
        (sysfs / f"devices/system/node/node{node}").mkdir(parents=True)
        (sysfs / f"devices/system/node/node{node}/cpulist").write_text(cpus)
    (check,) = gpus.numa(here)
    assert check.status is Status.WARN and "GPU 0 on node 0 (2 CPUs)" in check.found
    assert "may use no CPU of node 1, which GPU 0000:9b:00.0 is on" in check.found
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    (check,) = gpus.numa(here)
    assert check.status is Status.OK and "GPU 3 on node 1 (2 CPUs)" in check.found


def test_a_machine_that_names_no_node(machine):
    (check,) = gpus.numa(machine(H100, "gpu"))
    assert (check.status, check.found) == (Status.OK, "one node")


def test_the_compiler(machine, tmp_path, monkeypatch):
    (check,) = gpus.compiler(machine(H100, "gpu", PATH=str(tmp_path)))
    assert check.status is Status.FAIL and "gcc" in check.fix
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setattr(gpus.sysconfig, "get_path", lambda *_: str(tmp_path))
    (check,) = gpus.compiler(machine(H100, "gpu", PATH=str(tmp_path)))
    assert check.status is Status.FAIL and "Python.h" in check.found
    (tmp_path / "Python.h").write_text("")
    (check,) = gpus.compiler(machine(H100, "gpu", PATH=str(tmp_path)))
    assert (check.status, check.found) == (Status.OK, str(tmp_path / "gcc"))
    (check,) = gpus.compiler(machine(H100, "gpu", PATH=str(tmp_path), CC="icx"))
    assert check.status is Status.FAIL and "CC=icx is not there" in check.wanted


@pytest.mark.parametrize(
    ("environment", "status", "said"),
    [
        ({}, Status.OK, "none that is known"),
        ({"CUDA_VISIBLE_DEVICES": ""}, Status.WARN, "hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, Status.WARN, "hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "0,7"}, Status.WARN, "names GPUs that are not there (7)"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, Status.OK, "1 of 1 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5a7f"}, Status.OK, "1 of 1 GPUs"),
        ({"NCCL_P2P_DISABLE": "1"}, Status.WARN, "NCCL_P2P_DISABLE=1"),
        ({"NCCL_P2P_DISABLE": "0"}, Status.OK, "none that is known"),
    ],
)
def test_settings(machine, environment, status, said):
    (check,) = gpus.settings(machine(H100, "gpu", **environment))
    assert check.status is status and said in check.found


def test_libraries_that_come_before_those_of_torch(machine, tmp_path):
    (tmp_path / "libnccl.so.2").write_text("")
    (check,) = gpus.settings(machine(H100, "gpu", LD_LIBRARY_PATH=f"/nowhere:{tmp_path}:"))
    assert check.status is Status.WARN and str(tmp_path / "libnccl.so.2") in check.found
