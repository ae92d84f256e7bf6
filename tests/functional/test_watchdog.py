"""A rank that hangs is named, with its stack, and the launcher does not wait for ever; so is one that dies. Parts of a
start can be awaited."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable

import pytest
import ray

from nemo_rl_lite.cluster import calls, heartbeat
from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.heartbeat import last_heartbeats
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Request, Sampling
from nemo_rl_lite.workers.generation import RemoteReplica
from nemo_rl_lite.workers.reserve import ENGINE_LOOP
from tests.functional.conftest import PYTHONPATH
from tests.functional.ranks import reserved_ports

pytestmark = pytest.mark.functional


@pytest.fixture(autouse=True, scope="module")
def local_ray():
    """Ranks that hang are gone with it."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def group_of_two(name, folder, limit_s, collective_timeout_s) -> WorkerGroup:
    group = WorkerGroup(name, [{}, {}], str(folder), {"PYTHONPATH": PYTHONPATH}, limit_s=limit_s)
    wait(group.load("tests.functional.workers.Rank", [{}, {}]), timeout_s=600)
    with reserved_ports() as port:
        common = {"size": 2, "port": port, "timeout_s": collective_timeout_s}
        wait(group.start([{"rank": rank} | common for rank in range(2)]), timeout_s=600)
    return group


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_one_that_the_others_wait_for_is_named_with_every_stack(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_S", 200)
    group = group_of_two("policy", tmp_path, limit_s=3.0, collective_timeout_s=600.0)
    wait(group.call("meet", -1, 0), timeout_s=200)
    call = group.call("meet", 1, 600, phase="train")
    until(lambda: all(word in str(last_heartbeats(call.workers)) for word in ("barrier", "compute_for_ever")))
    with pytest.raises(WorkerError) as caught:
        wait(call)
    error = caught.value
    assert error.worker == "policy rank 1" and error.phase == "train" and not error.lost
    assert (
        "1 other waits" in str(error)
        and "optimizer step 3, micro batch 2" in str(error)
        and "compute_for_ever" in str(error)
    )
    assert "barrier" in error.details and "compute_for_ever" in error.details
    # Each process has written its threads' stacks to its own log too, which works where Python itself hangs.
    for rank, function in enumerate(("barrier", "compute_for_ever")):
        log = tmp_path / f"policy-{rank}.log"
        until(lambda log=log, function=function: function in log.read_text())
        assert "Timeout (0:00:03)!" in log.read_text()


@pytest.mark.slow
def test_where_others_give_up_first_it_is_still_the_one_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "DEATH_S", 4.0)
    group = group_of_two("trainer", tmp_path, limit_s=None, collective_timeout_s=4.0)
    with pytest.raises(WorkerError) as caught:
        wait(group.call("meet", 0, 600, phase="train"))
    assert caught.value.worker == "trainer rank 0"
    assert "it is still running, and worker error: trainer rank 1 failed in phase 'train'" in str(caught.value)
    assert "compute_for_ever" in caught.value.details


def test_one_that_dies_is_named_and_not_the_neighbour_whose_collective_fails(tmp_path):
    group = group_of_two("victim", tmp_path, limit_s=None, collective_timeout_s=600.0)
    call = group.call("meet", 1, 600, phase="train")
    until(lambda: all(word in str(last_heartbeats(call.workers)) for word in ("barrier", "compute_for_ever")))
    log = (tmp_path / "victim-1.log").read_text()
    os.kill(int(re.search(r"process (\d+)", log)[1]), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        wait(call)
    assert caught.value.worker == "victim rank 1" and caught.value.lost and "died" in str(caught.value)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("keeps_python", [False, True])
def test_a_step_of_an_engine_that_does_not_end_is_named_with_its_stack(tmp_path, monkeypatch, keeps_python):
    monkeypatch.setattr(heartbeat, "SILENT_S", 5)
    name = f"generation-{keeps_python}"
    group = WorkerGroup(name, [{}], str(tmp_path), {"PYTHONPATH": PYTHONPATH}, limit_s=4.0, is_listened=True)
    wait(group.load("tests.functional.workers.StuckEngine", [{}], runner_path=ENGINE_LOOP), timeout_s=200)
    wait(group.start([{"keeps_python": keeps_python}]), timeout_s=200)
    replica = RemoteReplica(group, 0)
    wait(group.call("call", "load"))
    # The process sets its own time limit with a heartbeat.
    loaded = time.time()
    until(lambda: last_heartbeats([f"{name} rank 0"])[0].at > loaded)

    async def sample() -> None:
        await replica.send({0: Request((1,), Sampling(1.0, 1.0, None, 8, (), ()), seed=1)}, [])
        while True:
            await replica.report()

    with pytest.raises(WorkerError) as caught:
        asyncio.run(sample())
    error = caught.value
    assert error.worker == f"{name} rank 0" and error.phase == "generate" and not error.lost
    if keeps_python:
        # No thread of Python can tell more: the process itself has written to its log.
        assert "no sign of life" in str(error) or "not done within 4 s" in str(error)
        log = tmp_path / f"{name}-0.log"
        until(lambda: "Timeout (0:00:04)!" in log.read_text() and "compute_in_c" in log.read_text())
    else:
        assert "its step is not done within 4 s" in str(error) and "step" in error.details


@pytest.mark.parametrize("fails", [False, True])
def test_the_launcher_goes_on_when_a_part_of_a_start_ends(tmp_path, fails):
    name = f"starting-{fails}"
    group = WorkerGroup(name, [{}], str(tmp_path), {"PYTHONPATH": PYTHONPATH}, is_listened=True)
    wait(group.load("tests.functional.workers.SlowStart", [{}]), timeout_s=200)
    go_on = tmp_path / "go on"
    start = group.start([{"go_on": str(go_on), "fails": fails}])
    if fails:
        # The start's end also ends the wait for a part that never comes.
        wait(group.start_reaches("cuda_graphs"), timeout_s=200)
        with pytest.raises(WorkerError, match="it fails"):
            wait(start, timeout_s=200)
        return
    wait(group.start_reaches("cuda_graphs"), timeout_s=200)
    assert ray.wait(list(start.references), timeout=0.5)[0] == []
    go_on.touch()
    (parts,) = wait(start, timeout_s=200)
    assert {"cuda_graphs", "build"} <= set(parts)
