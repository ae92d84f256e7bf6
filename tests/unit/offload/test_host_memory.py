"""Arenas of host memory, and copies that a thread feeds to the device."""

import logging
from pathlib import Path

import pytest
import torch

from nemo_rl_lite.offload import host_memory
from nemo_rl_lite.offload.host_memory import Copies, HostArena, LockError, chunks, copies_in
from nemo_rl_lite.system.machine import free_host_bytes


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


def test_copies_in_an_arena_are_saved_alone(tmp_path):
    arena = HostArena("copies", FakeRegistrar())
    tensors = [torch.randn(300, 5)[1:3].t(), torch.tensor(2.0), torch.randn(0, 2), torch.arange(5).to(torch.bfloat16)]
    expected = [one.clone() for one in tensors]
    copies = copies_in(arena, tensors)
    for one in tensors:
        one.zero_()
    for copy, own in zip(copies, expected, strict=True):
        assert torch.equal(copy, own) and copy.dtype == own.dtype
        # torch.save writes whole storages.
        assert copy.untyped_storage().nbytes() == own.nbytes
        assert not copy.numel() or 0 <= copy.data_ptr() - arena.reserve(1).data_ptr() < arena.nbytes
    assert arena.nbytes == 3 * 512


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


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_the_tightest_of_a_process_control_groups_counts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(
        groups / "slurm/job_7",
        max="1000000\n",
        current="600000\n",
        stat="anon 100\ninactive_file 20000\nactive_file 30000\n",
    )
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


def test_pieces_cover_every_byte_once_and_in_order(monkeypatch):
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 10)
    sources = [torch.arange(n, dtype=torch.uint8) for n in (25, 0, 10, 1, 2, 3)]
    targets = [torch.zeros_like(source) for source in sources]
    cut = list(chunks(zip(targets, sources, strict=True)))
    assert [[len(source) for source in piece] for _, piece in cut] == [[10], [10], [5, 5], [5, 1, 2, 2], [1]]
    for into, of in cut:
        for target, source in zip(into, of, strict=True):
            target.copy_(source)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_copies_are_whole_when_the_wait_is_over():
    source = torch.arange(40_000_000, dtype=torch.int32).view(torch.uint8)
    target = torch.zeros_like(source)
    own = Copies([(target, source)], None)
    own.wait()
    assert own.done() and own.seconds() > 0 and torch.equal(target, source)


def test_what_stops_them_is_raised_by_the_wait():
    own = Copies([(torch.zeros(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8))], None)
    with pytest.raises(ValueError, match="5 bytes to 3"):
        own.wait()
