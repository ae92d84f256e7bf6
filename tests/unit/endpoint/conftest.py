"""An endpoint of this module's tests, and an engine behind it."""

import pytest

from nemo_rl_lite.endpoint.server import Endpoint
from tests.unit.endpoint.served import LOCAL, Echo, answering
from tests.unit.rollout.script import Letters


@pytest.fixture(scope="module")
def endpoint():
    with Endpoint(LOCAL, Letters(), "own", 100).running() as running:
        yield running


@pytest.fixture
def echo(endpoint):
    engine = Echo()
    with answering(endpoint, engine):
        yield engine
