"""An endpoint of this module's tests, and an engine behind it."""

import pytest

from nemo_rl_lite.serving.server import Endpoint, bound_socket
from tests.unit.rollout.script import Letters
from tests.unit.serving.served import LOCAL, Echo, answering


@pytest.fixture(scope="module")
def endpoint():
    with bound_socket(LOCAL) as bound, Endpoint(bound, Letters(), ["own", "runs/own"], 100).running() as running:
        yield running


@pytest.fixture
def echo(endpoint):
    engine = Echo()
    with answering(endpoint, engine):
        yield engine
