"""A rank that NCCL keeps waiting: all aborts begin at once, and without one its process ends after a while."""

import os
import signal
from datetime import timedelta
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nemo_rl_lite.compat import torch as compat
from nemo_rl_lite.policy import groups
from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.group import RefitGroup


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(groups, "_failed_since", groups._failed_since)


def test_one_abort_does_not_wait_for_another(monkeypatch):
    together = Barrier(3, timeout=10)

    def refuse():
        together.wait()
        raise RuntimeError("timed out")

    fine = SimpleNamespace(abort=together.wait)
    monkeypatch.setattr(groups, "_backends", lambda: [fine, fine, SimpleNamespace(abort=refuse)])
    for one in groups.begin_abort():
        one.join(10)
    assert not together.broken and together.n_waiting == 0


def test_a_rank_that_nobody_frees_ends_a_minute_after_an_error(monkeypatch):
    ended = []
    monkeypatch.setattr(groups.os, "kill", lambda *given: ended.append(given))
    # The first error has passed: the rank has left its groups.
    for error, now in (("TIMEOUT", 0), ("TIMEOUT", 59), ("", 61), ("COMM_ERROR", 70), ("COMM_ERROR", 129)):
        groups._end_after(error, now)
    assert ended == []
    groups._end_after("COMM_ERROR", 131)
    assert ended == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize("frees", [False, True])
def test_a_heartbeat_aborts_on_request_alone(monkeypatch, frees):
    aborted, backend = [], SimpleNamespace(get_error=lambda: SimpleNamespace(name="SUCCESS"))
    monkeypatch.setattr(groups, "_backends", lambda: [backend])
    monkeypatch.setattr(groups, "begin_abort", lambda: aborted.append(True))
    groups.beat(frees)
    assert aborted == [True] * frees


def test_errors_have_names():
    backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name="REMOTE_ERROR"))
    assert compat.nccl_error(backend) == "REMOTE_ERROR"


def test_the_backends_are_those_of_nccl(monkeypatch):
    assert compat.nccl_backends() == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.new_group([0])
        assert compat.nccl_backends() == []
        monkeypatch.setattr(dist, "ProcessGroupNCCL", dist.ProcessGroupGloo)
        assert len(compat.nccl_backends()) == 2
    finally:
        dist.destroy_process_group()
    assert compat.nccl_backends() == []


def test_groups_of_refits_count_until_they_are_dropped():
    group = RefitGroup("NCCL's", 0, torch.device("cuda"), timedelta(seconds=1))
    refit_group._on_gpus.add(group)
    assert refit_group.nccl_backends() == ["NCCL's"]
    del group
    assert refit_group.nccl_backends() == []
