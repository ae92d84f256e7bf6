import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from nemo_rl_lite.diagnosis import services
from nemo_rl_lite.diagnosis.check import Status

SECRET = "0123456789abcdef0123456789abcdef01234567"


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


def test_a_hub_that_answers(machine, server):
    reached, token = services.hub(machine(HF_ENDPOINT=server, HF_TOKEN=SECRET))
    assert (reached.status, reached.found) == (Status.OK, f"{server} answers")
    assert token.status is Status.OK and SECRET not in token.found


def test_a_hub_out_of_reach(machine, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    reached, token = services.hub(machine(HF_ENDPOINT=address, HF_HOME=str(tmp_path)))
    assert reached.status is Status.WARN and "Connection refused" in reached.found
    assert "local folders" in reached.off and token.status is Status.SKIPPED


def test_a_hub_that_never_answers(machine, monkeypatch):
    monkeypatch.setattr(services, "ANSWER_LIMIT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        reached, _ = services.hub(machine(HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}"))
    assert reached.status is Status.WARN and "timed out" in reached.found


def test_a_hub_that_is_no_address(machine):
    assert next(iter(services.hub(machine(HF_ENDPOINT="not an address")))).status is Status.WARN


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_asks_nobody(machine, monkeypatch, name):
    monkeypatch.setattr(services, "_unreachable", lambda address: pytest.fail("it was asked"))
    reached, _ = services.hub(machine(**{name: "1"}))
    assert (reached.status, reached.found) == (Status.WARN, f"{name} is set")


def test_a_token_in_a_file(tmp_path):
    assert not services.has_hub_token({"HF_HOME": str(tmp_path)})
    (tmp_path / "token").write_text("")
    assert not services.has_hub_token({"HF_HOME": str(tmp_path)})
    (tmp_path / "token").write_text(SECRET)
    assert services.has_hub_token({"HF_HOME": str(tmp_path)})
    assert services.has_hub_token({"HF_TOKEN_PATH": str(tmp_path / "token")})
    assert services.has_hub_token({"XDG_CACHE_HOME": "/nowhere", "HF_TOKEN": SECRET})


def test_where_the_key_for_wandb_is(machine, tmp_path):
    home = {"HOME": str(tmp_path)}
    (check,) = services.wandb(machine(**home))
    assert check.status is Status.WARN and "logger.wandb.mode=offline" in check.off
    (check,) = services.wandb(machine(**home, WANDB_API_KEY=SECRET))
    assert (check.status, check.found) == (Status.OK, "a key for api.wandb.ai is in WANDB_API_KEY")
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {SECRET}\n")
    (check,) = services.wandb(machine(**home))
    assert (check.status, check.found) == (Status.OK, f"a key for api.wandb.ai is in {tmp_path / '.netrc'}")
    (check,) = services.wandb(machine(**home, WANDB_BASE_URL="https://wandb.company.example"))
    assert check.status is Status.WARN


def test_a_netrc_that_is_malformed_is_not_shown(machine, tmp_path):
    (tmp_path / "keys").write_text(f"machine api.wandb.ai\n  login user\n  passwrd {SECRET}\n")
    (check,) = services.wandb(machine(NETRC=str(tmp_path / "keys")))
    assert check.status is Status.WARN and "malformed at line" in check.found and SECRET not in str(check)


def test_a_mode_that_the_launcher_overrides(machine, tmp_path):
    mode, _ = services.wandb(machine(HOME=str(tmp_path), WANDB_MODE="offline"))
    assert mode.status is Status.WARN and mode.fix == "logger.wandb.mode=offline"


def test_wandb_agrees_on_its_file(tmp_path, monkeypatch):
    from wandb.sdk.lib.wbauth.wbnetrc import _get_netrc_file_path

    for environment in ({"HOME": str(tmp_path)}, {"NETRC": str(tmp_path / "other")}):
        with monkeypatch.context() as patch:
            patch.delenv("NETRC", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            assert services.netrc_file(environment) == _get_netrc_file_path()
