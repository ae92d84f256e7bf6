"""Ray serves this run alone."""

import os
import subprocess
import sys

import pytest

from nemo_rl_lite.system.machine import close_to_others


@pytest.fixture
def environ(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        # So that what is set in a test is gone after it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return monkeypatch


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


@pytest.mark.parametrize("address", [None, "", "local"])
def test_a_ray_of_its_own_has_a_secret(environ, address):
    if address is not None:
        environ.setenv("RAY_ADDRESS", address)
    close_to_others()
    first = variables()
    assert first["RAY_AUTH_MODE"] == "token" and len(first["RAY_AUTH_TOKEN"]) == 64
    environ.delenv("RAY_AUTH_MODE")
    close_to_others()
    assert variables()["RAY_AUTH_TOKEN"] != first["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize(("name", "value"), [("RAY_ADDRESS", "10.0.0.1:6379"), ("RAY_AUTH_MODE", "disabled")])
def test_a_cluster_of_somebody_elses_keeps_its_rules(environ, name, value):
    environ.setenv(name, value)
    close_to_others()
    assert "RAY_AUTH_TOKEN" not in variables() and variables()[name] == value


def test_a_ray_that_would_not_know_the_secret_gets_none(environ):
    environ.setitem(sys.modules, "ray", sys)
    before = variables()
    close_to_others()
    assert variables() == before


def test_it_comes_before_ray_is_imported():
    """Ray looks at the variables when it is imported."""
    script = """
import sys
import nemo_rl_lite.train, nemo_rl_lite.quickstart
import nemo_rl_lite.system.machine
assert not any(name == "ray" or name.startswith("ray.") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
