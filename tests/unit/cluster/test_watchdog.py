"""Who is named where workers do not come to an end."""

import pytest

from nemo_rl_lite.cluster import heartbeat
from nemo_rl_lite.cluster.heartbeat import SILENT_S, Heartbeat

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
        # An order of counts as a run makes it that has scored before it has trained.
        ([beat(0, WAITING, micro_batch=0, optimizer_step=4), beat(1, WAITING, micro_batch=9, optimizer_step=3)], [1]),
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


def test_without_a_sign_of_life_all_are_named(monkeypatch):
    monkeypatch.setattr(heartbeat, "last_heartbeats", lambda workers: [])
    assert "a, b failed in phase 'generate': not done" in str(heartbeat.hang(["a", "b"], "generate", "not done"))
