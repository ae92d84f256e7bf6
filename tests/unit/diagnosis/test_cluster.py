import socket

import pytest

from nemo_rl_lite.diagnosis import cluster
from nemo_rl_lite.diagnosis.check import Status


class Process:
    def __init__(self, pid: int, name: str):
        self.pid, self.info = pid, {"name": name}


def test_another_ray(machine, monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "process_iter", lambda fields: [Process(1, "init"), Process(7, "raylet")])
    (check,) = cluster.running_ray(machine())
    assert (check.status, check.found) == (Status.WARN, "1 running (raylet 7)") and "ray stop" in check.fix
    monkeypatch.setattr(psutil, "process_iter", lambda fields: [Process(1, "init")])
    assert next(cluster.running_ray(machine())).status is Status.OK


def test_a_cluster_that_is_named(machine):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (check,) = cluster.ray_address(machine(RAY_ADDRESS=address))
        assert check.status is Status.OK and "runs join that cluster" in check.found
    (check,) = cluster.ray_address(machine(RAY_ADDRESS=address))
    assert check.status is Status.FAIL and check.found.startswith(f"{address} does not answer")


@pytest.mark.parametrize(
    ("address", "status"),
    [("auto", Status.OK), ("local", Status.OK), ("somewhere", Status.WARN), ("127.0.0.1:99999999", Status.FAIL)],
)
def test_other_addresses(machine, address, status):
    assert next(cluster.ray_address(machine(RAY_ADDRESS=address))).status is status


def test_no_address(machine):
    assert next(cluster.ray_address(machine())).status is Status.OK


@pytest.mark.parametrize(
    ("span", "status"),
    [("32768 60999", Status.OK), ("1024 65535", Status.WARN), ("15000\t25000", Status.WARN), ("garbage", Status.OK)],
)
def test_ports_and_those_that_the_kernel_hands_out(machine, monkeypatch, span, status):
    monkeypatch.setattr(cluster, "_is_free", lambda port: True)
    here = machine()
    (here.system / "proc/sys/net/ipv4").mkdir(parents=True)
    (here.system / "proc/sys/net/ipv4/ip_local_port_range").write_text(f"{span}\n")
    assert next(cluster.ports(here)).status is status


def test_ports_that_are_refused(machine, monkeypatch):
    monkeypatch.setattr(cluster, "_is_free", lambda port: False)
    (check,) = cluster.ports(machine())
    assert check.status is Status.WARN and "0 of 40" in check.found

    def refuse(self, address):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    (check,) = cluster.ports(machine())
    assert check.status is Status.FAIL and "Operation not permitted" in check.found


def test_a_port_in_use_is_seen():
    with socket.socket() as server:
        server.bind(("", 0))
        assert not cluster._is_free(server.getsockname()[1])


def test_the_machines_own_name(machine, monkeypatch):
    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    assert next(cluster.host_name(machine())).found == "node-7 is 10.0.0.7"
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    (check,) = cluster.host_name(machine())
    assert check.status is Status.WARN and "/etc/hosts" in check.fix


@pytest.mark.parametrize(
    ("value", "statuses"),
    [
        (None, []),
        ("^docker0", []),
        ("eth", [Status.OK]),
        ("=eth0", [Status.OK]),
        ("ib0,eth0", [Status.OK]),
        ("ib0", [Status.WARN]),
    ],
)
def test_interfaces_that_are_named(machine, monkeypatch, value, statuses):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    environment = {} if value is None else {"NCCL_SOCKET_IFNAME": value}
    assert [check.status for check in cluster.interfaces(machine(**environment))] == statuses


def test_paths_of_sockets(machine, tmp_path):
    (check,) = cluster.short_paths(machine(RAY_TMPDIR="/tmp"))
    assert check.status is Status.OK
    (check,) = cluster.short_paths(machine(TMPDIR=str(tmp_path / ("x" * 60))))
    assert check.status is Status.FAIL and "RAY_TMPDIR=/tmp" in check.fix
    # Ray takes its own variable first.
    assert next(cluster.short_paths(machine(TMPDIR="/" + "x" * 60, RAY_TMPDIR="/tmp"))).status is Status.OK


def test_ray_agrees_on_its_folder_and_on_the_longest_path(monkeypatch):
    from ray._common.utils import get_default_ray_temp_dir
    from ray._private.utils import validate_socket_filepath

    monkeypatch.setenv("TMPDIR", "/from-tmpdir")
    assert get_default_ray_temp_dir() == str(cluster.ray_folder({"TMPDIR": "/from-tmpdir"}))
    validate_socket_filepath("x" * cluster.LONGEST_PATH)
    with pytest.raises(OSError):
        validate_socket_filepath("x" * (cluster.LONGEST_PATH + 1))


def test_slurm(machine, tmp_path):
    assert next(cluster.slurm(machine(PATH=str(tmp_path)))).status is Status.SKIPPED
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    (check,) = cluster.slurm(machine(PATH=str(tmp_path), SLURM_JOB_ID="12"))
    assert (check.status, check.found) == (Status.OK, f"{tmp_path / 'sbatch'}, in job 12")
