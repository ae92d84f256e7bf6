"""The resources of a node that a task reports to Ray."""

import os

import pytest

from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.slurm import node
from nemo_rl_lite.slurm.node import SlurmTask
from nemo_rl_lite.system.machine import MIB

TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
CORES = len(os.sched_getaffinity(0))


def test_ray_is_told_of_the_jobs_share_of_a_node():
    found = SlurmTask.from_environment(
        TASK | {"SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS_ON_NODE": "4", "SLURM_MEM_PER_NODE": "1000"}, interface="lo"
    )
    assert found == SlurmTask(rank=1, count=2, cpus=1, gpus=4, memory=1000 * MIB, address="127.0.0.1")
    options = dict(option.split("=") for option in found.ray_options())
    assert options["--num-cpus"] == "1" and options["--num-gpus"] == "4"
    assert options["--node-ip-address"] == "127.0.0.1"
    assert int(options["--memory"]) + int(options["--object-store-memory"]) == 1000 * MIB
    assert found.environment() == {"GLOO_SOCKET_IFNAME": "lo"}


def test_slurm_may_say_less_or_more():
    by_cpu = SlurmTask.from_environment(TASK | {"SLURM_CPUS_ON_NODE": "3", "SLURM_MEM_PER_CPU": "100"})
    assert by_cpu.memory == 300 * MIB
    # Ray detects what Slurm does not say.
    found = SlurmTask.from_environment(TASK)
    assert found.ray_options() == [f"--num-cpus={CORES}"] and found.environment() == {}
    assert SlurmTask.from_environment(TASK | {"SLURM_CPUS_ON_NODE": "100000"}).cpus == CORES


def test_the_address_is_that_of_the_interface_towards_srun(monkeypatch):
    assert SlurmTask.from_environment(TASK | {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}).address is None
    monkeypatch.setattr(node, "_addresses", lambda: [("eth0", "10.0.0.1"), ("ib0", "10.1.0.1"), ("ib0", "10.1.0.2")])
    assert SlurmTask.from_environment(TASK, "ib0").address == "10.1.0.1"
    assert SlurmTask.from_environment(TASK, "ib0").environment() == {"GLOO_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize(
    ("environ", "interface", "message"),
    [
        ({}, None, "SLURM_PROCID is not set: start this with srun"),
        (TASK | {"SLURM_NTASKS": "4"}, None, "4 tasks on 2 nodes; start one per node"),
        (TASK, "ib7", "has no interface 'ib7' with an IPv4 address; it has .*lo"),
    ],
)
def test_what_cannot_be_is_said(environ, interface, message):
    with pytest.raises(LauncherError, match=message):
        SlurmTask.from_environment(environ, interface)
