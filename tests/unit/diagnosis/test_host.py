import math
import os
import resource
import shutil
from collections import namedtuple

import pytest

from nemo_rl_lite.diagnosis import host
from nemo_rl_lite.diagnosis.check import CheckStatus
from tests.unit.diagnosis.samples import H100

OK, WARN, FAIL, SKIPPED = CheckStatus
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
    assert check.status is WARN and check.found.startswith("2.5 GiB free: a control group")


def test_memory_is_enough_where_the_machine_has_it(machine, monkeypatch):
    monkeypatch.setattr(host, "free_host_bytes", lambda system: 100 * 2**40)
    (check,) = host.memory(machine())
    assert check.status is OK and check.found.startswith("102400.0 GiB free of")


def test_cpus_that_a_control_group_shares_out(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    here = machine()
    group_v2(here.system, cpu__max="250000 100000\n")
    (check,) = host.cpus(here)
    assert check.status is WARN and "the time of 2.5" in check.found
    assert check.fix.endswith("cluster.threads_per_worker=2")


@pytest.mark.parametrize(
    ("quota", "granted"), [("max 100000\n", math.inf), ("400000 100000\n", 4.0), ("garbage\n", math.inf)]
)
def test_quotas_of_version_2(tmp_path, quota, granted):
    (tmp_path / "cpu.max").write_text(quota)
    assert host.cpu_quota(tmp_path) == granted


@pytest.mark.parametrize(("quota", "found"), [("-1\n", "2 of 64"), ("150000\n", "the time of 1.5")])
def test_quotas_of_version_1(machine, monkeypatch, quota, found):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    here = machine()
    system = here.system
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/self/cgroup").write_text("4:memory:/x\n2:cpu,cpuacct:/box\n")
    group = system / "sys/fs/cgroup/cpu,cpuacct/box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(quota)
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert next(host.cpus(here)).found.endswith(found)


def test_one_cpu_is_few(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert next(host.cpus(machine())).status is WARN
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert next(host.cpus(machine())).status is OK


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, WARN), (11 * 10**9, OK)])
def test_shared_memory(machine, monkeypatch, free, status):
    monkeypatch.setattr(host, "free_host_bytes", lambda system: 500 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    (check,) = host.shared_memory(machine())
    assert check.status is status and ("--shm-size" in check.fix) == (status is WARN)


def test_no_shared_memory(machine):
    (check,) = host.shared_memory(machine())
    assert check.status is FAIL and check.found == "not usable: No such file or directory"


def test_locked_memory(machine, monkeypatch):
    limits(monkeypatch, 8 * 2**20, 8 * 2**20)
    assert list(host.locked_memory(machine())) == []
    (check,) = host.locked_memory(machine([H100]))
    assert (check.status, check.found) == (WARN, "8 MiB") and "memlock=-1" in check.fix
    limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert next(host.locked_memory(machine([H100]))).status is OK


def test_disks(machine, monkeypatch, tmp_path):
    import huggingface_hub.constants

    here = machine(RAY_TMPDIR=str(tmp_path / "ray-is-here"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000 * GIB, 990 * GIB, 10 * GIB))
    folder, ray, cache = *host.disks(here), *host.hub_disk(here)
    assert (folder.status, cache.status, ray.status) == (WARN,) * 3
    assert str(tmp_path / "hf/hub") in cache.found and "99% used" in ray.found
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000 * GIB, 10 * GIB, 990 * GIB))
    assert [check.status for check in (*host.disks(here), *host.hub_disk(here))] == [OK] * 3


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check = host.disk("disk", tmp_path / "outputs", "every run")
    assert check.status is FAIL and check.found == f"{tmp_path} cannot be written"
