import os
import threading
from pathlib import Path

import pytest

from nemo_rl_lite.system import numa
from nemo_rl_lite.system.numa import Binding, bind

GPU = "0000:3b:00.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes a sysfs with the GPU on one node; the process' real CPUs, threads and memory policy stay as they are."""
    moved = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: moved.append((thread, frozenset(cpus))))
    monkeypatch.setattr(numa, "_prefer_memory_of", lambda node: "")

    def write(node: str, cpulist: str | None = "0,1-1,64-65") -> Path:
        gpu = tmp_path / "bus/pci/devices" / GPU
        gpu.mkdir(parents=True)
        (gpu / "numa_node").write_text(f"{node}\n")
        if cpulist is not None:
            nodes = tmp_path / f"devices/system/node/node{node}"
            nodes.mkdir(parents=True)
            (nodes / "cpulist").write_text(f"{cpulist}\n")
        return tmp_path

    write.moved = moved
    return write


def test_the_process_runs_on_the_cpus_of_the_node_that_it_may_use(machine):
    binding = bind(GPU, machine("1"))
    assert binding == Binding(1, frozenset({0, 1}), True, "")
    assert binding.describe() == "bound to NUMA node 1: 2 CPUs and its memory"
    threads = {int(entry.name) for entry in Path("/proc/self/task").iterdir()}
    assert threads <= {thread for thread, _ in machine.moved}
    assert {cpus for _, cpus in machine.moved} == {frozenset({0, 1})}


@pytest.mark.parametrize(
    ("node", "cpulist", "why"),
    [
        ("-1", None, "names no node"),
        ("0", None, "sysfs does not name"),
        ("0", "64-127", "may use no CPU of node 0"),
        ("unknown", None, "sysfs does not name"),
    ],
)
def test_where_the_machine_does_not_tell_nothing_is_done(node, cpulist, why, machine):
    binding = bind(GPU, machine(node, cpulist))
    assert binding.node is None and binding.cpus == {0, 1, 2, 3}
    assert binding.describe().startswith("not bound to a NUMA node: ") and why in binding.describe()
    assert not machine.moved


def test_where_cpus_cannot_be_chosen_that_is_said(machine, monkeypatch):
    def refuse(thread, cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    binding = bind(GPU, machine("0"))
    assert binding.node is None and "Operation not permitted" in binding.note


def test_a_node_that_is_not_there_is_refused_without_an_error():
    assert numa._prefer_memory_of(900).startswith("memory is left where it is first written (E")


def test_threads_that_run_and_threads_that_come_are_moved():
    before = os.sched_getaffinity(0)
    one = {min(before)}
    stop, seen = threading.Event(), []
    running = threading.Thread(target=stop.wait)
    running.start()
    try:
        numa._run_on(one)
        tasks = [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
        assert running.native_id in tasks
        assert all(os.sched_getaffinity(task) == one for task in tasks)
        late = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        late.start()
        late.join()
        assert seen == [one]
    finally:
        numa._run_on(before)
        stop.set()
        running.join()
