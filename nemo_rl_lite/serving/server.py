"""The endpoint: an HTTP server in a thread of this process, and the gate from it to the event loop of the engines."""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from nemo_rl_lite.config.schema import ServeConfig
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.generation.interface import Generation, Requests
from nemo_rl_lite.serving.protocol import (
    Answer,
    Asked,
    ChatRequest,
    CompletionHandler,
    CompletionRequest,
    RefusedError,
    read_request,
)
from nemo_rl_lite.serving.public import PublicHandler, ResponderConfig

Written = dict[str, Any]
"""The body of a response."""

ASLEEP = (
    "the engines do not generate now, because the policy trains or gets its new weights to them: ask again during the "
    "next rollout"
)


@dataclass(eq=False)
class _Session:
    """Who answers the requests of a key, and those that are under way."""

    respondent: CompletionHandler
    tasks: set[asyncio.Task] = field(default_factory=set)


class LoopBridge:
    """Knows the keys, and gives each request to the respondent of its key."""

    def __init__(self, token: str, write: Callable[[Asked, Answer], Written]):
        """`token` is a key that is known also while the gate is closed. `write` makes a response of an answer."""
        self._token, self._write = token, write
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: dict[str, _Session] = {}

    @property
    def is_open(self) -> bool:
        return self._loop is not None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Within the block requests are answered, in this event loop. Those that are left at its end are cancelled."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self._lock:
                self._loop = None
            # What the server's thread has just handed over begins now, and ends at once.
            await asyncio.sleep(0)

    @asynccontextmanager
    async def session(self, respondent: CompletionHandler, key: str | None = None) -> AsyncIterator[str]:
        """Within the block the respondent answers the requests with the key that this yields. What is under way at its
        end is cancelled, and has ended."""
        key, session = key or secrets.token_urlsafe(24), _Session(respondent)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            for task in session.tasks:
                task.cancel()
            await asyncio.gather(*session.tasks, return_exceptions=True)

    def knows(self, key: str) -> bool:
        """Whether a request with this key may be answered, now or later."""
        return key in self._sessions or secrets.compare_digest(key.encode(), self._token.encode())

    def ask(self, key: str, asked: Asked) -> Future[Written]:
        """Hand over a request; called by the server's thread. Cancelling the future aborts the request.

        Raises:
            RefusedError: the gate is closed.
        """
        with self._lock:
            if self._loop is None:
                raise RefusedError(503, ASLEEP)
            return asyncio.run_coroutine_threadsafe(self._answer(key, asked), self._loop)

    async def _answer(self, key: str, asked: Asked) -> Written:
        session = self._sessions.get(key)
        if session is None or not self.is_open:
            raise RefusedError(503, ASLEEP)
        task = asyncio.current_task()
        if task is not None:
            session.tasks.add(task)
            task.add_done_callback(session.tasks.discard)
        return self._write(asked, await session.respondent.respond(asked))


# nginx's status for a client that has gone; nobody reads it.
_CLIENT_GONE = 499
# Seconds that the server has to start, and to end.
_LIMIT_S = 30.0
_ANSWERED = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models and GET /health"
_EVERYWHERE = ("0.0.0.0", "::", "")


class Endpoint:
    """OpenAI's API for the engines of this process' run."""

    def __init__(
        self, config: ServeConfig, tokenizer: ChatTokenizer, model: str, max_length: int, token: str | None = None
    ):
        """`model` is the name that requests give, `max_length` the most tokens of prompt and response, `token` the key
        of requests that belong to no episode; None: a new one."""
        self.model, self.token = model, token or secrets.token_urlsafe(24)
        self._config, self._max_length = config, max_length
        self.gate = LoopBridge(self.token, lambda asked, answer: asked.body(answer, tokenizer, model))
        self._address = ("", 0)

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        host, port = self._address
        shown = "127.0.0.1" if host in _EVERYWHERE else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"

    @contextmanager
    def running(self) -> Iterator["Endpoint"]:
        """Serve within the block.

        Raises:
            ConfigError: the address cannot be used.
        """
        listening = self._listen()
        options = uvicorn.Config(
            application(self.gate, self.model, self._max_length),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(options)
        thread = threading.Thread(target=server.run, args=([listening],), name="endpoint", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(_LIMIT_S)
            listening.close()

    @asynccontextmanager
    async def answering(self, anybody: CompletionHandler | None) -> AsyncIterator[None]:
        """Within the block sessions get answers, and `anybody` answers those who have the token."""
        async with self.gate.open():
            if anybody is None:
                yield
                return
            async with self.gate.session(anybody, self.token):
                yield

    def _listen(self) -> socket.socket:
        host, port = self._config.host, self._config.port or 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(2048)
        except OSError as error:
            listening.close()
            rule = f"cannot listen there: {error.strerror or error}"
            fix = "generation.serve.port=null (nrl-lite serve without --port) finds a free port"
            raise ConfigError([Violation("generation.serve.host", f"{host}:{port}", rule, fix)]) from error
        self._address = listening.getsockname()[:2]
        return listening


def application(gate: LoopBridge, model: str, max_length: int) -> FastAPI:
    """The routes. All but `/health` need a key."""
    app = FastAPI(openapi_url=None)
    started = int(time.time())

    @app.exception_handler(RefusedError)
    async def refuse(_: Request, refused: RefusedError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
        return JSONResponse(refused.body(), refused.status, headers)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
        rule = f"there is no {request.method} {request.url.path} here, only {_ANSWERED}"
        return JSONResponse(RefusedError(error.status_code, rule).body(), error.status_code, error.headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"engines": "generating" if gate.is_open else "asleep"}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _key(request, gate)
        described = {"id": model, "object": "model", "created": started, "owned_by": "nemo_rl_lite"}
        return {"object": "list", "data": [{**described, "max_model_len": max_length}]}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionRequest)

    async def answer(request: Request, kind: type[Asked]) -> Response:
        key = _key(request, gate)
        asked = read_request(kind, _parsed(await request.body()))
        if asked.model not in (None, model):
            rule = f"there is no model {asked.model!r:.100} here, only {model!r}"
            raise RefusedError(404, rule, "model", "model_not_found")
        written = await _unless_gone(request, asyncio.wrap_future(gate.ask(key, asked)))
        if written is None:
            return Response(status_code=_CLIENT_GONE)
        if asked.stream:
            events = f"data: {json.dumps(asked.chunk(written))}\n\ndata: [DONE]\n\n"
            return Response(events, media_type="text/event-stream")
        return JSONResponse(written)

    return app


def _parsed(body: bytes) -> Any:
    """The JSON of a body. Raises RefusedError: it is none, is nested too deeply, or has half of a character."""
    try:
        content = json.loads(body)
        if b"\\u" in body:
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    return content


def _key(request: Request, gate: LoopBridge) -> str:
    """The key of a request. Raises RefusedError: nobody has it."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not gate.knows(key):
        raise RefusedError(
            401,
            "a key is needed, as `Authorization: Bearer KEY`: an agent's endpoint.api_key, which ends with its "
            "episode, or the token that was printed, or is in the run's endpoint.json",
            code="invalid_api_key",
        )
    return key


async def _unless_gone(request: Request, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any] | None:
    """Wait for the answer; None, and the request is aborted, where the client has gone before.

    Raises:
        RefusedError: the respondent refuses, the engines fail, or they stop before there is an answer.
    """
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return None
        if answer.cancelled():
            raise RefusedError(503, ASLEEP)
        if (error := answer.exception()) is not None:
            raise error if isinstance(error, RefusedError) else RefusedError(500, f"{type(error).__name__}: {error}")
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    with suppress(asyncio.CancelledError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


@dataclass(frozen=True)
class ServedGeneration:
    """`Generation` that also answers over HTTP. `speaker` answers requests with the token; None: they are refused, and
    only the sessions of episodes get answers."""

    generation: Generation
    endpoint: Endpoint
    speaker: ResponderConfig | None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Requests]:
        """See `Generation.serving`."""
        async with self.generation.serving() as requests:
            anybody = None if self.speaker is None else PublicHandler(self.speaker, requests)
            async with self.endpoint.answering(anybody):
                yield requests

    def finish_generation(self) -> dict[str, float]:
        """See `Generation.finish_generation`."""
        return self.generation.finish_generation()
