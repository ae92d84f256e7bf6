"""A lost policy rank costs one process: the others are freed from their wait for it, and build again."""

import logging
import os
import re
import signal
import sys
import time

import pytest
import ray
import torch

from nemo_rl_lite.cluster import heartbeat
from nemo_rl_lite.cluster.calls import Call, wait
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.workers import reserve
from tests.functional.conftest import PYTHONPATH
from tests.functional.lost_policy import describe, lose_a_rank

pytestmark = pytest.mark.functional
LIMIT_S = 5 * heartbeat.PERIOD_S
LOST, BLOCKED = 1, "tests.functional.blocked_workers.Blocked"


@pytest.fixture(autouse=True, scope="module")
def local_ray():
    ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def build(group: WorkerGroup, closing: list[str]) -> list[int]:
    """Build the workers; return their processes."""
    wait(group.load(BLOCKED, [{}] * len(group)), timeout_s=200)
    wait(group.start([{"closing": one} for one in closing]), timeout_s=200)
    return wait(group.call("process"), timeout_s=200)


def test_ranks_that_come_back_keep_their_processes(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(reserve, "POLICY_CLASS", BLOCKED)
    how = ["well", "well", "fails", "stuck", "well"]
    group = WorkerGroup("policy", [{}] * 5, str(tmp_path), {"PYTHONPATH": PYTHONPATH}, limit_s=600)
    before = build(group, how)
    # The last one is done already.
    calls = [group.call_one(rank, [("train", ())], "train") for rank in range(4)]
    os.kill(before[LOST], signal.SIGKILL)
    with pytest.raises(WorkerError) as caught:
        wait(*calls)
    assert caught.value.lost and caught.value.worker == f"policy rank {LOST}"
    began = time.monotonic()
    with caplog.at_level(logging.INFO, "nemo_rl_lite.workers.reserve"):
        closing = group.close()
        # Ray fails a call of a dead process a moment later.
        ray.wait([closing.references[LOST]], timeout=60)
        assert reserve._replace_dead(group, closing) == [LOST]
        kept = reserve._closed(group, closing, LIMIT_S)
    assert kept == [0, 4] and time.monotonic() - began < LIMIT_S + 3
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2 and "RuntimeError: CUDA error: an illegal memory access" in said[0]
    assert "not done within" in said[1] and all("it gets a new process" in line for line in said)
    group.replace([2, 3])
    after = build(group, ["well"] * 5)
    assert [rank for rank in range(5) if after[rank] == before[rank]] == kept
    log = (tmp_path / f"policy-{LOST}.log").read_text()
    assert re.findall(r"process (\d+)", log) == [str(one[LOST]) for one in (before, after)]
    # A request that a worker needed no more does not free its successor.
    time.sleep(2 * heartbeat.PERIOD_S)
    assert wait(group.call("is_freed"), timeout_s=60) == [False] * 5


def test_a_rank_that_waits_without_a_lost_one_is_freed_too(tmp_path):
    """This happens after a phase that takes too long."""
    group = WorkerGroup("slow", [{}] * 2, str(tmp_path), {"PYTHONPATH": PYTHONPATH}, limit_s=600)
    before = build(group, ["well"] * 2)
    waiting: Call = group.call("train")
    assert reserve._closed(group, group.close(), LIMIT_S) == [0, 1]
    assert wait(waiting, timeout_s=0) == ["wrong weights"] * 2
    group.replace([])
    assert build(group, ["well"] * 2) == before


@pytest.mark.parametrize(("layout", "victim"), [("data", 0), pytest.param("tensor", 1, marks=pytest.mark.slow)])
def test_the_step_after_a_lost_rank_is_the_one_without_the_loss(tmp_path, model_folder, layout, victim):
    """The case of `tests/gpu/test_lost_rank.py` on CPUs."""
    split = ["policy.megatron_cfg.tensor_model_parallel_size=2"] if layout == "tensor" else []
    found = lose_a_rank(tmp_path, model_folder, victim, ["cluster.cpu_ranks=2", *split])
    sys.stdout.write(f"{describe(found)}\n")
    assert found.kept == [1 - victim]
    assert [rank for rank in range(2) if found.after[rank] == found.before[rank]] == found.kept
    assert all(torch.equal(found.weights[name], one) for name, one in found.undisturbed.items())
