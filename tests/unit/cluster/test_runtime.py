"""Ray's start: a second attempt where the machine is overloaded, and one sentence where that fails too."""

import logging

import pytest
import ray
from ray._private.node import Node

from nemo_rl_lite.cluster.runtime import _start_or_join
from nemo_rl_lite.errors import ConfigError, LauncherError

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed"


@pytest.fixture
def calls(monkeypatch):
    """Give a function that sets what each call of ray.init raises, and returns the calls that are made."""

    def made_with(*outcomes: Exception | str | None) -> list[str]:
        made, left = [], list(outcomes)

        def init(**_: object) -> None:
            made.append("init")
            if error := left.pop(0):
                raise Exception(error) if isinstance(error, str) else error

        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(ray, "shutdown", lambda: made.append("shutdown"))
        return made

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made_with


def test_ray_is_started_a_second_time(calls, caplog):
    made = calls(SLOW, None)
    with caplog.at_level(logging.WARNING):
        _start_or_join()
    assert made == ["init", "shutdown", "init"] and "trying once more" in caplog.text


def test_the_processes_of_a_node_that_did_not_start_end(calls, monkeypatch):
    ended = []
    monkeypatch.setattr(Node, "start", _slow_start, raising=False)
    monkeypatch.setattr(Node, "kill_all_processes", lambda self, **_: ended.append(self))
    node, attempts = Node.__new__(Node), iter([True, False])
    calls()
    monkeypatch.setattr(ray, "init", lambda **_: node.start() if next(attempts) else None)
    _start_or_join()
    assert ended == [node]


def _slow_start(self: Node) -> None:
    raise Exception(SLOW)


def test_two_slow_starts_end_with_a_sentence(calls):
    made = calls(SLOW, SLOW)
    with pytest.raises(LauncherError, match=r"twice: the machine is overloaded.*ray start --head") as end:
        _start_or_join()
    assert made == ["init", "shutdown", "init"] and end.value.exit_status == 1


@pytest.mark.parametrize("first", [[], [SLOW]])
def test_another_error_stays(calls, first):
    made = calls(*first, ValueError("no such thing"))
    with pytest.raises(ValueError, match="no such thing"):
        _start_or_join()
    assert made.count("init") == len(first) + 1


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_a_long_folder_for_sockets_names_the_variable(calls, kind):
    calls(kind("AF_UNIX path length cannot exceed 107 bytes: '/long/ray/session/sockets/plasma_store'"))
    with pytest.raises(ConfigError, match=r"TMPDIR = .*\n.*too long.*\n.*RAY_TMPDIR=/tmp"):
        _start_or_join()


def test_a_cluster_that_cannot_be_joined_is_not_tried_again(calls, monkeypatch):
    made = calls(ConnectionError("no one there"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="cannot be joined: no one there"):
        _start_or_join()
    assert made == ["init"]
