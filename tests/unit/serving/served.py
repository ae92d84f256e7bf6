"""An endpoint at a real port, over a queue with one scripted engine."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.config.schema import ServeConfig
from nemo_rl_lite.generation.interface import RequestError, Sampling, Unfinished
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.serving.public import PublicHandler, ResponderConfig
from nemo_rl_lite.serving.server import Endpoint
from tests.unit.generation.stepped import Stepped
from tests.unit.rollout.script import END, Letters, completion

SAMPLING = Sampling(1.0, 1.0, None, max_new_tokens=40, stop_token_ids=(END,), stop_strings=())
SPEAKER = ResponderConfig(Letters(), SAMPLING, max_length=100, engine=ENGINES["vllm"])
LOCAL = ServeConfig(True, "127.0.0.1", None)


class Streaming(Stepped):
    """An engine that says one token a report to requests that stream."""

    seconds = 0.001

    def __init__(self):
        super().__init__()
        self.streams = {}

    def reported(self, submitted, said):
        """What a report has of new responses, and of those that stream already."""
        self.streams |= {number: [said.pop(number), 0] for number, one in submitted.items() if one.streams}
        return said | dict(map(self.spoken, list(self.streams)))

    def spoken(self, number):
        """One more token of a response."""
        whole, spoken = self.streams[number][0], self.streams[number][1] + 1
        self.streams[number][1] = spoken
        if spoken == len(whole.tokens):
            return number, self.streams.pop(number)[0]
        new = slice(spoken - 1, spoken)
        return number, Unfinished(whole.tokens[new], whole.logprobs[new], "length", (0,))


class Echo(Streaming):
    """An engine that says what it was asked; it never finishes what begins with `slow`."""

    def __init__(self):
        super().__init__()
        self.asked, self.aborted, self.begun = [], [], threading.Event()

    def work(self, submitted, aborted):
        self.asked += submitted.values()
        self.aborted += aborted
        texts = {number: "".join(map(chr, request.prompt[:-1])) for number, request in submitted.items()}
        if any(text.startswith("slow") for text in texts.values()):
            self.begun.set()
        said = {number: completion(text[:39]) for number, text in texts.items() if not text.startswith("slow")}
        for number, request in submitted.items():
            options = request.sampling.options
            if options.json_schema == '{"type": "unheard-of"}':
                said[number] = RequestError("the grammar is invalid")
            elif count := options.top_logprobs:
                tokens = said[number].tokens
                said[number] = replace(
                    said[number], top_logprobs=((tuple((88 + i, -float(i)) for i in range(count)),) * len(tokens))
                )
        return self.reported(submitted, said)


class Client(httpx.Client):
    """Asks one endpoint, as somebody who has its token."""

    def __init__(self, endpoint: Endpoint, **options):
        keys = {"Authorization": f"Bearer {endpoint.token}"}
        super().__init__(base_url=endpoint.url, headers=keys, trust_env=False, **options)

    def chat(self, *said: str, **parameters) -> httpx.Response:
        messages = [{"role": "user", "content": text} for text in said]
        return self.post("/chat/completions", json={"messages": messages, **parameters})


@contextmanager
def leaving_client(endpoint: Endpoint) -> Iterator[None]:
    """Ask for what takes for ever, and hang up at the end of the block."""
    body = json.dumps({"messages": [{"role": "user", "content": "slow"}]}).encode()
    url = httpx.URL(endpoint.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {endpoint.token}\r\n"
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield


@contextmanager
def answering(endpoint: Endpoint, engine: Echo, speaker: ResponderConfig = SPEAKER) -> Iterator[None]:
    """Let the engine serve a rollout in a thread for the time of the block."""
    loop, stopped, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        queue = RequestQueue([engine], 8, lambda replica, error: None, lambda: None)
        async with queue.serving() as requests, endpoint.answering(PublicHandler(speaker, requests)):
            ready.set()
            await stopped.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
