"""Heartbeats: the worker that is named where some do not come to an end, and the use of machines and GPUs."""

from types import SimpleNamespace

import pytest

from nemo_rl_lite.cluster import heartbeat
from nemo_rl_lite.cluster.heartbeat import SILENT_S, Heartbeat, SystemUsage
from nemo_rl_lite.observability.system import Usage

NOW = 1000.0
WAITING = ("/x/worker.py:10 train", "/lib/torch/distributed/distributed_c10d.py:3000 all_reduce")
WORKING = ("/x/worker.py:10 train", "/x/batches.py:7 token_logprobs")


def beat(rank: int, stack=WORKING, at=NOW - 1, **counts) -> Heartbeat:
    return Heartbeat(f"policy rank {rank}", "train", NOW - 60, at, counts, stack)


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ([beat(0, WAITING), beat(1, WORKING), beat(2, WAITING)], [1]),
        ([beat(0, WAITING), beat(1, WORKING), beat(2, WORKING, at=NOW - SILENT_S - 1)], [2]),
        ([beat(0, WAITING, optimizer_step=3, micro_batch=5), beat(1, WAITING, optimizer_step=3, micro_batch=4)], [1]),
        ([beat(0, WAITING, optimizer_step=4, micro_batch=0), beat(1, WAITING, optimizer_step=3, micro_batch=9)], [1]),
        ([beat(0, WORKING, optimizer_step=4, micro_batch=0), beat(1, WAITING, optimizer_step=3, micro_batch=9)], [1]),
        (
            [beat(0, WORKING, optimizer_step=3, micro_batch=2), beat(1, WORKING, optimizer_step=3, micro_batch=2)],
            [0, 1],
        ),
        # Engines count nothing.
        ([beat(0, WORKING, optimizer_step=3), beat(1, WAITING)], [0]),
        ([], []),
    ],
)
def test_the_one_that_others_wait_for(beats, expected):
    assert heartbeat.stragglers(beats, NOW) == [f"policy rank {rank}" for rank in expected]


def test_the_error_names_it_and_has_every_stack(monkeypatch):
    beats = [beat(0, WAITING, optimizer_step=3, micro_batch=2), beat(1, WORKING, optimizer_step=3, micro_batch=2)]
    monkeypatch.setattr(heartbeat, "last_heartbeats", lambda workers: beats)
    monkeypatch.setattr(heartbeat.time, "time", lambda: NOW)
    error = heartbeat.hang([one.worker for one in beats], "train", "not done within 60 s")
    assert str(error) == (
        "worker error: policy rank 1 failed in phase 'train': not done within 60 s; 1 other waits; policy rank 1: "
        "train for 60 s, optimizer step 3, micro batch 2, at /x/batches.py:7 token_logprobs"
    )
    assert "all_reduce" in error.details and "token_logprobs" in error.details


def usage_beat(worker: str, node: str, samples: int, **sums: float) -> Heartbeat:
    return Heartbeat(worker, "idle", 0.0, 0.0, node=node, usage=Usage(samples, sums))


@pytest.fixture
def beats(monkeypatch) -> list[Heartbeat]:
    told: list[Heartbeat] = []
    monkeypatch.setattr(heartbeat, "last_heartbeats", lambda workers: [one for one in told if one.worker in workers])
    return told


def test_machines_are_numbered_as_workers_are_and_shared_gpus_are_one(beats):
    usage = SystemUsage(lambda: ["policy rank 0", "policy rank 1", "generation rank 0"])
    beats += [
        usage_beat("policy rank 0", "b", 2, **{"mem_gb": 8.0, "gpu.0.util": 100.0}),
        usage_beat("policy rank 1", "a", 1, **{"mem_gb": 6.0, "gpu.0.util": 90.0}),
        usage_beat("generation rank 0", "b", 1, **{"mem_gb": 2.0, "gpu.0.util": 70.0}),
    ]
    assert usage.take() == {
        "node.0.mem_gb": 3.0,
        "node.0.gpu.0.util": 60.0,
        "node.1.mem_gb": 6.0,
        "node.1.gpu.0.util": 90.0,
    }


def test_a_step_has_the_mean_of_its_own_samples_or_what_was_last_seen(beats):
    usage = SystemUsage(lambda: ["policy rank 0"])
    assert usage.take() == {}
    beats.append(usage_beat("policy rank 0", "a", 0))
    assert usage.take() == {}
    beats[:] = [usage_beat("policy rank 0", "a", 2, cpu_util=100.0)]
    assert usage.take() == usage.take() == {"node.0.cpu_util": 50.0}
    beats[:] = [usage_beat("policy rank 0", "a", 3, cpu_util=110.0)]
    assert usage.take() == {"node.0.cpu_util": 10.0}


def test_a_call_never_leaves_a_background_thread_without_its_time_limit(monkeypatch):
    """Between a cancellation and the next limit, the thread could take the GIL for ever."""
    limits = []
    context = SimpleNamespace(get_node_id=lambda: "node", get_job_id=lambda: "job")
    monkeypatch.setattr(heartbeat.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(heartbeat, "kv_del", lambda key: None)
    monkeypatch.setattr(heartbeat.threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(heartbeat.faulthandler, "dump_traceback_later", lambda limit_s, file: limits.append(limit_s))
    monkeypatch.setattr(heartbeat.faulthandler, "cancel_dump_traceback_later", lambda: limits.append(None))
    beats = heartbeat.HeartbeatThread("generation rank 0")
    monkeypatch.setattr(heartbeat, "background_work", lambda: None)
    with beats.during("load", 4.0):
        pass
    assert limits == [4.0, None]
    monkeypatch.setattr(heartbeat, "background_work", object)
    with beats.during("send", 3.0):
        pass
    assert limits[2:] == [3.0, 3.0]
