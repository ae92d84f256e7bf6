"""Endpoints with an engine behind them, and OpenAI's client."""

import httpx
import pytest
from openai import OpenAI

from nemo_rl_lite.serving.server import Endpoint, bound_socket
from tests.unit.rollout.script import Letters
from tests.unit.serving.served import LOCAL, Echo, answering
from tests.unit.serving.test_tools import speaking


@pytest.fixture(scope="module")
def endpoint():
    with bound_socket(LOCAL) as bound, Endpoint(bound, Letters(), ["own", "runs/own"], 100).running() as running:
        yield running


@pytest.fixture
def echo(endpoint):
    engine = Echo()
    with answering(endpoint, engine):
        yield engine


@pytest.fixture
def openai(endpoint):
    with OpenAI(base_url=endpoint.url, api_key=endpoint.token, http_client=httpx.Client(trust_env=False)) as client:
        yield client


@pytest.fixture
def model(tmp_path):
    with speaking(tmp_path, "qwen3_instruct_2507.jinja", "<|im_end|>") as model:
        yield model
