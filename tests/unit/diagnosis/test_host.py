import os
import resource
import shutil
from collections import namedtuple

import pytest

from nemo_rl_lite.diagnosis import host
from nemo_rl_lite.diagnosis.check import Status
from nemo_rl_lite.diagnosis.smi import GpuAnswer, parse_gpus
from tests.unit.diagnosis import samples

H100 = GpuAnswer(parse_gpus(samples.H100))
Usage = namedtuple("Usage", "total used free")
GIB = 2**30


def limits(monkeypatch, soft: int, hard: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))


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
    (check,) = host.memory(here)
    assert check.status is Status.WARN and check.found.startswith("2.5 GiB free: a control group")


def test_memory_is_enough_where_the_machine_has_it(machine, monkeypatch):
    monkeypatch.setattr(host, "free_host_bytes", lambda system: 100 * 2**40)
    (check,) = host.memory(machine())
    assert check.status is Status.OK and check.found.startswith("102400.0 GiB free of")


def test_cpus_that_a_control_group_shares_out(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    here = machine(OMP_NUM_THREADS="1")
    group_v2(here.system, cpu__max="250000 100000\n")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    check, threads = host.cpus(here)
    assert check.status is Status.WARN and "the time of 2.5" in check.found
    assert check.fix.startswith("cluster.threads_per_worker=2 ")
    assert threads.status is Status.OK and "cluster.threads_per_worker" in threads.found


@pytest.mark.parametrize(("quota", "granted"), [("max 100000\n", None), ("400000 100000\n", 4.0), ("garbage\n", None)])
def test_quotas_of_version_2(machine, quota, granted):
    here = machine()
    group_v2(here.system, cpu__max=quota)
    assert host.cpu_quota(here.system) == granted


@pytest.mark.parametrize(("quota", "granted"), [("-1\n", None), ("150000\n", 1.5)])
def test_quotas_of_version_1(machine, quota, granted):
    system = machine().system
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/self/cgroup").write_text("4:memory:/x\n2:cpu,cpuacct:/box\n")
    group = system / "sys/fs/cgroup/cpu,cpuacct/box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(quota)
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert host.cpu_quota(system) == granted


def test_others_that_want_the_cpus(machine, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (17.2, 3.0, 1.0))
    _, load = host.cpus(machine())
    assert (load.name, load.status, load.found) == ("load", Status.WARN, "17 processes want the 8 CPUs")
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 30.0, 30.0))
    assert [check.name for check in host.cpus(machine())] == ["CPUs"]


def test_one_cpu_is_few(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert next(host.cpus(machine())).status is Status.WARN
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert next(host.cpus(machine())).status is Status.OK


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, Status.WARN), (11 * 10**9, Status.OK)])
def test_shared_memory(machine, monkeypatch, free, status):
    monkeypatch.setattr(host, "free_host_bytes", lambda system: 500 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    (check,) = host.shared_memory(machine())
    assert check.status is status and ("--shm-size" in check.fix) == (status is Status.WARN)


def test_no_shared_memory(machine):
    (check,) = host.shared_memory(machine())
    assert check.status is Status.FAIL and check.found == "not usable: No such file or directory"


def test_locked_memory(machine, monkeypatch):
    limits(monkeypatch, 8 * 2**20, 8 * 2**20)
    assert next(host.locked_memory(machine())).status is Status.SKIPPED
    (check,) = host.locked_memory(machine(H100, "gpu"))
    assert (check.status, check.found) == (Status.WARN, "8 MiB") and "memlock=-1" in check.fix
    limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert next(host.locked_memory(machine(H100, "gpu"))).status is Status.OK


@pytest.mark.parametrize(
    ("hard", "status"), [(1024, Status.WARN), (65536, Status.OK), (resource.RLIM_INFINITY, Status.OK)]
)
def test_open_files(machine, monkeypatch, hard, status):
    # Ray raises the limit in force by itself.
    limits(monkeypatch, 512, hard)
    assert next(host.open_files(machine())).status is status


def test_disks(machine, monkeypatch, tmp_path):
    here = machine(HF_HOME=str(tmp_path / "hf"), RAY_TMPDIR=str(tmp_path / "ray-is-here"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000 * GIB, 990 * GIB, 10 * GIB))
    folder, cache, ray = host.disks(here)
    assert (folder.status, cache.status, ray.status) == (Status.WARN,) * 3
    assert str(tmp_path / "hf/hub") in cache.found and "99% used" in ray.found
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000 * GIB, 10 * GIB, 990 * GIB))
    assert [check.status for check in host.disks(here)] == [Status.OK] * 3


def test_the_cache_of_the_hub():
    assert str(host.hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"})) == "/a"
    assert str(host.hub_cache({"HF_HOME": "/b"})) == "/b/hub"
    assert str(host.hub_cache({"XDG_CACHE_HOME": "/c"})) == "/c/huggingface/hub"


def test_outputs(machine, tmp_path, monkeypatch):
    (check,) = host.outputs(machine())
    assert check.status is Status.OK and list(tmp_path.glob("outputs*")) == []

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host.tempfile, "TemporaryFile", refuse)
    (tmp_path / "outputs").mkdir()
    (check,) = host.outputs(machine())
    assert check.status is Status.FAIL
    assert check.found == f"{tmp_path / 'outputs'} cannot be written: Permission denied"
