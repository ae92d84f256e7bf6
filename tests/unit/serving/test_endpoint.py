"""The endpoint's protocol, over a real port: what it answers, refuses, and takes back."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from nemo_rl_lite.config.schema import ServeConfig
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.serving import connections
from nemo_rl_lite.serving.public import PublicHandler
from nemo_rl_lite.serving.server import Endpoint, bound_socket
from tests.unit.rollout.script import END, Letters
from tests.unit.serving.served import SAMPLING, SPEAKER, Client, Echo, answering, leaving_client


def test_an_answer_has_the_tokens_and_logprobs_that_were_sampled(endpoint, echo):
    with Client(endpoint) as client:
        said = client.chat("ab", logprobs=True, model="own").json()
        assert client.chat("ab").json()["choices"][0]["logprobs"] is None
    (choice,) = said["choices"]
    tokens = [ord("a"), ord("b"), END]
    assert said["object"] == "chat.completion" and said["model"] == "own"
    assert said["prompt_token_ids"] == [ord(letter) for letter in "ab|"] and choice["token_ids"] == tokens
    assert choice["message"] == {"role": "assistant", "content": "ab"} and choice["finish_reason"] == "stop"
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-1 / 8, -2 / 8, -3 / 8]
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["a", "b", "\0"]
    assert said["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert echo.asked[0].sampling == SAMPLING


def test_a_request_may_choose_its_sampling_and_every_request_has_a_seed(endpoint, echo):
    with Client(endpoint) as client:
        for parameters in (
            {"temperature": 0},
            {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7},
            {},
        ):
            client.chat("ab", max_tokens=9, **parameters).raise_for_status()
    greedy, chosen, usual = echo.asked
    assert (greedy.sampling.temperature, greedy.sampling.top_p) == (0, 1)
    assert (chosen.sampling.temperature, chosen.sampling.top_p, chosen.sampling.top_k, chosen.seed) == (0.5, 0.9, 3, 7)
    assert chosen.sampling.min_p == 0.1 and usual.sampling.min_p == 0
    assert usual.sampling.temperature == 1 and len({one.seed for one in echo.asked}) == 3
    assert {one.sampling.max_new_tokens for one in echo.asked} == {9}


@pytest.mark.parametrize(
    ("parameters", "status", "said"),
    [
        ({"functions": [{"name": "add"}]}, 400, "is not supported here: use tools"),
        ({"best_of": 3}, 400, "best_of = 3 is not supported here: leave it out"),
        ({"temperature": 3}, 400, "temperature = 3: must be 0, or 0.01 to 2"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, 400, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": "a" * 99}], "max_tokens": 1}, 400, "exceed the context of 100"),
        ({"model": "gpt"}, 404, "unknown model 'gpt'; this endpoint serves 'own'"),
    ],
)
def test_what_is_not_done_is_refused_and_not_ignored(endpoint, echo, parameters, status, said):
    with Client(endpoint) as client:
        refused = client.chat("ab", **parameters)
    assert refused.status_code == status and said in refused.json()["error"]["message"] and not echo.asked


class Mute:
    """Engines that never answer."""

    def __init__(self):
        self.asked = asyncio.Event()

    async def sample(self, request, progress=None):
        self.asked.set()
        await asyncio.Event().wait()


NO_JSON = {
    "half": b"{",
    "deep": b"[" * 200_000,
    "surrogate": b'{"prompt": "a\\ud800b"}',
    "raw surrogate": b'{"prompt": "a\xed\xa0\x80b"}',
    "Latin-1": b'{"prompt": "\xe9"}',
    "NaN": b'{"prompt": "a", "metadata": {"a": NaN}}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
}


@pytest.mark.parametrize("body", NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_json_is_refused(endpoint, echo, body):
    with Client(endpoint) as client:
        refused = client.post("/completions", content=body)
    assert refused.status_code == 400 and "is not JSON" in refused.json()["error"]["message"] and not echo.asked


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer other"}, {"Authorization": "Basic x"}])
def test_nobody_is_answered_without_a_key(endpoint, echo, header):
    for method, path in (("GET", "/models"), ("POST", "/chat/completions"), ("POST", "/completions")):
        refused = httpx.request(method, f"{endpoint.url}{path}", headers=header, trust_env=False)
        assert refused.status_code == 401 and "Authorization: Bearer KEY" in refused.json()["error"]["message"]
    assert not echo.asked


def test_between_rollouts_requests_are_told_to_come_again(endpoint):
    health = endpoint.url.replace("/v1", "/health")
    with Client(endpoint) as client:
        with answering(endpoint, Echo()):
            assert client.get(health).json() == {"engines": "generating"} and client.chat("ab").status_code == 200
        assert client.get(health).json() == {"engines": "asleep"}
        refused = client.chat("ab")
        assert refused.status_code == 503 and "during the next rollout" in refused.json()["error"]["message"]
        (model,) = client.get("/models").json()["data"]
        assert model["id"] == "own" and model["max_model_len"] == 100


def test_one_model_is_described_by_each_of_its_names(endpoint):
    with Client(endpoint) as client:
        (listed,) = client.get("/models").json()["data"]
        assert all(client.get(f"/models/{name}").json() == listed for name in ("own", "runs/own", "runs%2Fown"))
        refused = client.get("/models/gpt")
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    with OpenAI(base_url=endpoint.url, api_key=endpoint.token) as client:
        assert client.models.retrieve("runs/own").id == "own"


@pytest.mark.parametrize("kind", [OpenAI, Anthropic])
def test_clients_do_not_ask_again_after_their_episode(endpoint, kind):
    """A second request would get status 401."""

    def ask(key):
        url = endpoint.url if kind is OpenAI else endpoint.url.removesuffix("/v1")
        with kind(base_url=url, api_key=key) as client:
            create = client.chat.completions.create if kind is OpenAI else client.messages.create
            return create(model="own", messages=[{"role": "user", "content": "ab"}], max_tokens=9)

    async def play():
        requests = Mute()
        async with endpoint.gate.open():
            async with endpoint.gate.session(PublicHandler(SPEAKER, requests)) as key:
                asking = asyncio.create_task(asyncio.to_thread(ask, key))
                await asyncio.wait_for(requests.asked.wait(), 20)
            return await asking

    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        asyncio.run(play())
    assert caught.value.status_code == 410 and "the episode of this key has ended" in str(caught.value)


def test_a_client_that_goes_takes_its_request_with_it(endpoint, echo):
    with leaving_client(endpoint):
        assert echo.begun.wait(30)
    until = time.monotonic() + 30
    while not echo.aborted:
        assert time.monotonic() < until
        time.sleep(0.005)
    with Client(endpoint) as client:
        assert client.chat("ab").status_code == 200
    assert len(echo.aborted) == 1 and len(echo.asked) == 2


HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le"


def connected(endpoint, sent: bytes) -> socket.socket:
    url = httpx.URL(endpoint.url)
    connection = socket.create_connection((url.host, url.port), timeout=30)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_written_requests_leave_room_for_others(endpoint, echo, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 8)
    held = [connected(endpoint, HALF) for _ in range(30)]
    with Client(endpoint, timeout=30) as client:
        assert client.get(endpoint.url.replace("/v1", "/health")).status_code == 200
        assert client.chat("ab").status_code == 200
    assert all(is_closed(one) for one in held[:20])
    for one in held:
        one.close()


def test_a_request_whose_head_does_not_end_is_closed(endpoint, echo, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    answered = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for sent in (b"", HALF, answered + HALF):
        with connected(endpoint, sent) as connection, connection.makefile("rb") as received:
            assert (b"200 OK" in received.read()) == sent.startswith(answered)
    monkeypatch.setattr(connections, "HEAD_S", 30.0)
    endless = b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 50_000
    with connected(endpoint, b"") as connection, contextlib.suppress(ConnectionError):
        connection.sendall(endless)
        assert is_closed(connection)


def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error(endpoint, echo, caplog):
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.token}\r\n"
    connected(endpoint, f"{head}Content-Length: 100\r\n\r\n{{".encode()).close()
    with Client(endpoint) as client:
        assert client.chat("ab").status_code == 200
    assert not caplog.records


LONG = {
    "chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 101}]}]},
    "completions": {"prompt": "a" * 101},
}


@pytest.mark.parametrize("path", LONG)
def test_a_text_that_cannot_fit_is_not_tokenized(endpoint, echo, monkeypatch, path):
    monkeypatch.delattr(Letters, "prompt")
    monkeypatch.delattr(Letters, "opening")
    with Client(endpoint) as client:
        refused = client.post(f"/{path}", json=LONG[path]).json()["error"]
    assert "101 characters exceed policy.max_total_sequence_length = 100" in refused["message"]
    assert refused["code"] == "context_length_exceeded" and not echo.asked


def test_a_request_that_a_rollouts_end_meets_gets_an_answer(endpoint):
    engine, answers = Echo(), []

    def ask():
        with Client(endpoint, timeout=30) as client:
            answers.append(client.chat("slow"))

    asking = threading.Thread(target=ask)
    with answering(endpoint, engine):
        asking.start()
        assert engine.begun.wait(30)
    asking.join()
    assert [one.status_code for one in answers] == [503] and "next rollout" in json.dumps(answers[0].json())


def test_an_address_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = ServeConfig(True, "127.0.0.1", other.getsockname()[1])
        with pytest.raises(ConfigError, match=r"cannot listen on this address.*\n.*generation.serve.port=null"):
            bound_socket(config).__enter__()


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "10.0.0.7"), ("127.0.0.1", "127.0.0.1")])
def test_clients_on_other_machines_get_the_address_of_this_one(host, shown):
    with bound_socket(ServeConfig(True, host, None)) as bound:
        url = httpx.URL(Endpoint(bound, None, ["model"], 8).url_at("10.0.0.7"))
        assert (url.host, url.port) == (shown, bound.getsockname()[1])
