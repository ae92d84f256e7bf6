import logging
from pathlib import Path

import psutil
import pytest

from nemo_rl_lite.errors import HostMemoryError
from nemo_rl_lite.host.machine import free_host_bytes
from nemo_rl_lite.offload import arena as arena_module
from nemo_rl_lite.offload.arena import HostArena, LockError


class FakeRegistrar:
    """Remembers what is locked; refuses on request."""

    def __init__(self, refuses: bool = False):
        self.refuses = refuses
        self.tried = 0
        self.locked: dict[int, int] = {}

    def lock(self, address: int, nbytes: int) -> None:
        self.tried += 1
        if self.refuses:
            raise LockError("not permitted")
        self.locked[address] = nbytes

    def unlock(self, address: int) -> None:
        del self.locked[address]


def test_memory_is_exact_locked_once_and_reused():
    registrar = FakeRegistrar()
    arena = HostArena("states", registrar)
    buffer = arena.reserve(3_000_001)
    assert registrar.locked == {buffer.data_ptr(): 3_000_001}
    assert arena.locked and arena.nbytes == 3_000_001
    buffer.fill_(7)
    again = arena.reserve(1000)
    assert again.data_ptr() == buffer.data_ptr() and again.numel() == 1000 and again[999] == 7
    assert registrar.tried == 1


def test_growth_unlocks_the_old_memory_first():
    registrar = FakeRegistrar()
    arena = HostArena("states", registrar)
    arena.reserve(4096)
    buffer = arena.reserve(8192)
    assert registrar.locked == {buffer.data_ptr(): 8192}


def test_release_pairs_with_the_lock_and_may_come_twice():
    registrar = FakeRegistrar()
    arena = HostArena("states", registrar)
    arena.reserve(4096)
    arena.release()
    arena.release()
    assert not registrar.locked and not arena.locked and arena.nbytes == 0


def test_memory_that_cannot_be_locked_is_pageable_with_one_warning(caplog):
    registrar = FakeRegistrar(refuses=True)
    arena = HostArena("optimizer states", registrar)
    with caplog.at_level(logging.WARNING):
        arena.reserve(4096).fill_(1)
        arena.reserve(8192).fill_(1)
    assert not arena.locked and registrar.tried == 1
    (record,) = caplog.records
    message = record.getMessage()
    assert "optimizer states" in message and "not permitted" in message and "RLIMIT_MEMLOCK" in message
    assert "policy.use_pinned_optimizer_offload=false" in message
    arena.release()


def test_nothing_is_taken_where_too_little_is_free(monkeypatch):
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: 2**30)
    arena = HostArena("optimizer states", FakeRegistrar())
    with pytest.raises(HostMemoryError, match=r"optimizer states need 2.00 GiB .* 1.00 GiB are free"):
        arena.reserve(2**31)
    assert arena.nbytes == 0


def test_nothing_may_be_reserved():
    arena = HostArena("states", FakeRegistrar())
    assert arena.reserve(0).numel() == 0
    arena.release()


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_without_control_groups_the_machine_is_the_limit(tmp_path):
    assert free_host_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_the_tightest_of_a_process_control_groups_counts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "slurm/job_7", max="1000000\n", current="600000\n", stat="anon 100\ninactive_file 50000\n")
    write(groups / "slurm/job_7/step_0", max="max\n", current="600000\n", stat="anon 100\n")
    assert free_host_bytes(tmp_path) == 450_000
    write(groups / "slurm", max="700000\n", current="690000\n", stat="")
    assert free_host_bytes(tmp_path) == 10_000


def test_control_groups_of_the_first_version_count_as_well(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n")
    group = tmp_path / "sys/fs/cgroup/memory/docker/x"
    write(group, limit_in_bytes="1000000", usage_in_bytes="900000", stat="total_inactive_file 1\n")
    assert free_host_bytes(tmp_path) == 100_001
