import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants

from nemo_rl_lite.diagnosis import network
from nemo_rl_lite.diagnosis.check import CheckStatus
from nemo_rl_lite.diagnosis.host import ray_folder

OK, WARN, FAIL, SKIPPED = CheckStatus
SECRET = "0123456789abcdef0123456789abcdef01234567"


class Process:
    def __init__(self, pid: int, name: str):
        self.pid, self.info = pid, {"name": name}


def test_another_ray(machine, monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "process_iter", lambda fields: [Process(1, "init"), Process(7, "raylet")])
    (check,) = network.running_ray(machine())
    assert (check.status, check.found) == (WARN, "1 running (raylet 7)") and "ray stop" in check.fix
    monkeypatch.setattr(psutil, "process_iter", lambda fields: [Process(1, "init")])
    assert next(network.running_ray(machine())).status is OK


def test_a_cluster_that_is_named(machine):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (check,) = network.cluster_address(machine(RAY_ADDRESS=address))
        assert check.status is OK and "runs join that cluster" in check.found
    (check,) = network.cluster_address(machine(RAY_ADDRESS=address))
    assert check.status is FAIL and check.found.startswith(f"{address} does not answer")


@pytest.mark.parametrize(
    ("address", "status"), [("auto", OK), ("local", OK), ("somewhere", FAIL), ("127.0.0.1:99999999", FAIL), ("", OK)]
)
def test_other_addresses(machine, address, status):
    assert next(network.cluster_address(machine(RAY_ADDRESS=address))).status is status


@pytest.mark.parametrize(
    ("span", "status"), [("32768 60999", OK), ("1024 65535", WARN), ("15000\t25000", WARN), ("garbage", OK)]
)
def test_ports_and_those_that_the_kernel_uses(machine, monkeypatch, span, status):
    monkeypatch.setattr(network, "is_free", lambda port: True)
    here = machine()
    (here.system / "proc/sys/net/ipv4").mkdir(parents=True)
    (here.system / "proc/sys/net/ipv4/ip_local_port_range").write_text(f"{span}\n")
    assert [check.status for check in network.ports(here)][1:] == ([] if span == "garbage" else [status])


def test_ports_that_are_refused(machine, monkeypatch):
    monkeypatch.setattr(network, "is_free", lambda port: False)
    (check,) = network.ports(machine())
    assert check.status is FAIL and "0 of 40" in check.found


def test_a_port_in_use_is_seen():
    with socket.socket() as server:
        server.bind(("", 0))
        assert network.is_free(0) and not network.is_free(server.getsockname()[1])


def test_the_machines_own_name(machine, monkeypatch):
    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    assert next(network.host_name(machine())).found == "node-7 is 10.0.0.7"
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    (check,) = network.host_name(machine())
    assert check.status is WARN and "/etc/hosts" in check.fix


def test_paths_of_sockets(machine, tmp_path):
    assert next(network.socket_paths(machine(RAY_TMPDIR="/tmp"))).status is OK
    # Ray prefers its own variable.
    assert next(network.socket_paths(machine(TMPDIR="/" + "x" * 60, RAY_TMPDIR="/tmp"))).status is OK
    (check,) = network.socket_paths(machine(RAY_TMPDIR=str(tmp_path / ("x" * 60))))
    assert check.status is FAIL and "RAY_TMPDIR=/tmp" in check.fix


def test_ray_agrees_on_its_folder_and_on_the_longest_path(monkeypatch):
    from ray._common.utils import get_default_ray_temp_dir
    from ray._private.utils import validate_socket_filepath

    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/from-tmpdir")
    assert get_default_ray_temp_dir() == str(ray_folder())
    validate_socket_filepath("x" * network.LONGEST_PATH)
    with pytest.raises(OSError):
        validate_socket_filepath("x" * (network.LONGEST_PATH + 1))


@pytest.fixture
def server():
    """The address of a server that refuses everything: it answers."""

    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(401)

        def log_message(self, *_):
            pass

    http = HTTPServer(("127.0.0.1", 0), Refuses)
    Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


@pytest.fixture
def hub(machine, monkeypatch, tmp_path):
    """Calls the check of a hub at `address`, with no token but what the keywords set in the environment."""
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def check(address="", offline=False, **environment):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        return tuple(network.hub(machine(**environment)))

    return check


def test_a_hub_that_answers(hub, server):
    (check,) = hub(server, HF_TOKEN=SECRET)
    assert (check.status, check.found) == (OK, f"{server} answers; a token is there")


def test_a_hub_out_of_reach(hub):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        (check,) = hub(f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert check.status is WARN and "Connection refused" in check.found and "; no token" in check.found
    assert "local folders" in check.off


def test_a_hub_that_never_answers(hub, monkeypatch):
    monkeypatch.setattr(network, "ANSWER_LIMIT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        (check,) = hub(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert check.status is WARN and "timed out" in check.found


def test_a_hub_that_is_no_address(hub):
    assert hub("not an address")[0].status is WARN


def test_no_server_is_asked_offline(hub, monkeypatch):
    monkeypatch.setattr(network, "unreachable", lambda address: pytest.fail("it was asked"))
    (check,) = hub(offline=True)
    assert check.status is WARN and "HF_HUB_OFFLINE is set" in check.found


@pytest.fixture
def wandb(machine, monkeypatch):
    """Calls the check of W&B in an environment of the keywords alone."""
    for name in ("NETRC", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return lambda **environment: next(network.wandb(machine(**environment)))


def test_where_the_key_for_wandb_is(wandb, tmp_path):
    home = {"HOME": str(tmp_path)}
    check = wandb(**home)
    assert check.status is WARN and "logger.wandb.mode=offline" in check.off
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {SECRET}\n")
    check = wandb(**home)
    assert (check.status, check.found) == (OK, f"a key for api.wandb.ai is in {tmp_path / '.netrc'}")
    assert wandb(**home, WANDB_BASE_URL="https://wandb.company.example").status is WARN
    check = wandb(**home, WANDB_BASE_URL="", WANDB_API_KEY=SECRET)
    assert (check.status, check.found) == (OK, "a key for api.wandb.ai is in WANDB_API_KEY")


def test_a_netrc_that_is_malformed_is_not_shown(wandb, tmp_path):
    (tmp_path / "keys").write_text(f"machine api.wandb.ai\n  login user\n  passwrd {SECRET}\n")
    check = wandb(NETRC=str(tmp_path / "keys"))
    assert check.status is WARN and "malformed at line" in check.found and SECRET not in str(check)
