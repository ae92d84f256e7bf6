"""Metrics of machines from heartbeats."""

import pytest

from nemo_rl_lite.cluster import system_usage
from nemo_rl_lite.cluster.heartbeat import Heartbeat
from nemo_rl_lite.cluster.system_usage import SystemUsage
from nemo_rl_lite.observability.system import Usage


def beat(worker: str, node: str, samples: int, **sums: float) -> Heartbeat:
    return Heartbeat(worker, "idle", 0.0, 0.0, node=node, usage=Usage(samples, sums))


@pytest.fixture
def beats(monkeypatch) -> list[Heartbeat]:
    told: list[Heartbeat] = []
    monkeypatch.setattr(system_usage, "last_heartbeats", lambda workers: [one for one in told if one.worker in workers])
    return told


def test_machines_are_numbered_as_workers_are_and_shared_gpus_are_one(beats):
    usage = SystemUsage(["policy rank 0", "policy rank 1", "generation rank 0"])
    beats += [
        beat("policy rank 0", "b", 2, **{"mem_gb": 8.0, "gpu.0.util": 100.0}),
        beat("policy rank 1", "a", 1, **{"mem_gb": 6.0, "gpu.0.util": 90.0}),
        beat("generation rank 0", "b", 1, **{"mem_gb": 2.0, "gpu.0.util": 70.0}),
    ]
    assert usage.take() == {
        "node.0.mem_gb": 3.0,
        "node.0.gpu.0.util": 60.0,
        "node.1.mem_gb": 6.0,
        "node.1.gpu.0.util": 90.0,
    }


def test_a_step_has_the_mean_of_its_own_samples_or_what_was_last_seen(beats):
    usage = SystemUsage(["policy rank 0"])
    assert usage.take() == {}
    beats.append(beat("policy rank 0", "a", 0))
    assert usage.take() == {}
    beats[:] = [beat("policy rank 0", "a", 2, cpu_util=100.0)]
    assert usage.take() == usage.take() == {"node.0.cpu_util": 50.0}
    beats[:] = [beat("policy rank 0", "a", 3, cpu_util=110.0)]
    assert usage.take() == {"node.0.cpu_util": 10.0}
