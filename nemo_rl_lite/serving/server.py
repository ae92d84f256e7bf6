"""Serves the OpenAI API: an HTTP server in a thread, and the bridge to the engines' event loop."""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nemo_rl_lite.config.schema import ServeConfig
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.generation.interface import Completion, Generation, Requests
from nemo_rl_lite.serving.connections import BoundedProtocol
from nemo_rl_lite.serving.protocol import (
    ApiRequest,
    ChatRequest,
    CompletionHandler,
    CompletionRequest,
    RefusedError,
    read_request,
)
from nemo_rl_lite.serving.public import PublicHandler, ResponderConfig
from nemo_rl_lite.serving.stream import Chunk, Send, StreamWriter

_ASLEEP = "the engines are paused while the policy trains or refits them: try again during the next rollout"
# nginx's status for a disconnected client, which no one reads.
_CLIENT_GONE = 499
# Seconds for the server to end.
_LIMIT_S = 30.0
_ANSWERED = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models and GET /health"
_EVERYWHERE = ("0.0.0.0", "::", "")


@dataclass(eq=False)
class _Session:
    """The handler of a key, and its unfinished requests."""

    handler: CompletionHandler
    tasks: set[asyncio.Task] = field(default_factory=set)


class LoopBridge:
    """Passes requests from the server's thread to the handler of their key, in the engines' event loop."""

    def __init__(self, token: str, tokenizer: ChatTokenizer, model: str):
        """`token`: a key that is valid even while the gate is closed."""
        self._token, self._tokenizer, self._model = token, tokenizer, model
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: dict[str, _Session] = {}

    @property
    def is_open(self) -> bool:
        return self._loop is not None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Answer requests in this event loop."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self._lock:
                self._loop = None
            # A request that was just handed over starts now, and is refused.
            await asyncio.sleep(0)

    @asynccontextmanager
    async def session(self, handler: CompletionHandler, key: str | None = None) -> AsyncIterator[str]:
        """Yield a key whose requests go to the handler; cancel unfinished requests at the end."""
        key, session = key or secrets.token_urlsafe(24), _Session(handler)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            for task in session.tasks:
                task.cancel()
            await asyncio.gather(*session.tasks, return_exceptions=True)

    def knows(self, key: str) -> bool:
        return key in self._sessions or secrets.compare_digest(key.encode(), self._token.encode())

    def ask(self, key: str, asked: ApiRequest, send: Send | None = None) -> Future[dict[str, Any]]:
        """Hand over a request from the server's thread. Cancelling the future aborts it. `send` receives the chunks of
        a stream, in the engines' thread. Raises RefusedError: the gate is closed."""
        with self._lock:
            if self._loop is None:
                raise RefusedError(503, _ASLEEP)
            return asyncio.run_coroutine_threadsafe(self._answer(key, asked, send), self._loop)

    async def _answer(self, key: str, asked: ApiRequest, send: Send | None) -> dict[str, Any]:
        session = self._sessions.get(key)
        if session is None or not self.is_open:
            raise RefusedError(503, _ASLEEP)
        task = asyncio.current_task()
        if task is not None:
            session.tasks.add(task)
            task.add_done_callback(session.tasks.discard)
        if send is None:
            return asked.body(await session.handler.respond(asked), self._tokenizer, self._model)
        writer = StreamWriter(asked, self._tokenizer, self._model)

        def tell(index: int, so_far: Completion) -> None:
            for chunk in writer.begun(index, so_far):
                send(chunk)

        for chunk in writer.ended(await session.handler.respond(asked, tell)):
            send(chunk)
        return {}


class Endpoint:
    """The OpenAI API of a run's engines."""

    def __init__(
        self,
        bound: socket.socket,
        tokenizer: ChatTokenizer,
        models: Sequence[str],
        max_length: int,
        token: str | None = None,
    ):
        """Create an endpoint; `running` starts it.

        Args:
            bound: a socket of `bound_socket`.
            models: accepted names of the model; answers have the first.
            max_length: maximum number of tokens of a prompt and its response.
            token: key of requests outside of episodes; None generates one.
        """
        self.model, self.token = models[0], token or secrets.token_urlsafe(24)
        self._bound, self._models, self._max_length = bound, models, max_length
        self.gate = LoopBridge(self.token, tokenizer, self.model)

    @property
    def url(self) -> str:
        """Return the base URL for clients on this machine."""
        host, port = self._bound.getsockname()[:2]
        shown = "127.0.0.1" if host in _EVERYWHERE else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"

    @contextmanager
    def running(self) -> Iterator["Endpoint"]:
        """Run the server during the block."""
        options = uvicorn.Config(
            _application(self.gate, self._models, self._max_length),
            http=BoundedProtocol,
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(options)
        thread = threading.Thread(target=server.run, args=([self._bound],), name="endpoint", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(_LIMIT_S)

    @asynccontextmanager
    async def answering(self, anybody: CompletionHandler | None) -> AsyncIterator[None]:
        """Answer the requests of sessions, and those with the token by `anybody`."""
        async with self.gate.open(), self.gate.session(anybody, self.token) if anybody else nullcontext():
            yield


@contextmanager
def bound_socket(config: ServeConfig) -> Iterator[socket.socket]:
    """Yield a listening socket at the address.

    Raises:
        ConfigError: the address cannot be used.
    """
    host, port = config.host, config.port or 0
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as bound:
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
            bound.listen(2048)
        except OSError as error:
            rule = f"cannot listen on this address: {error.strerror or error}"
            fix = "generation.serve.port=null finds a free port"
            raise ConfigError([Violation("generation.serve.host", f"{host}:{port}", rule, fix)]) from error
        yield bound


def _application(gate: LoopBridge, names: Sequence[str], max_length: int) -> FastAPI:
    """Return the routes of the server. All except `/health` need a key."""
    app = FastAPI(openapi_url=None)
    started = int(time.time())

    @app.exception_handler(RefusedError)
    async def refuse(_: Request, refused: RefusedError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
        return JSONResponse(refused.body(), refused.status, headers)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
        rule = f"unknown route {request.method} {request.url.path}; known are {_ANSWERED}"
        return JSONResponse(RefusedError(error.status_code, rule).body(), error.status_code, error.headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"engines": "generating" if gate.is_open else "asleep"}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _key(request, gate)
        described = {"id": names[0], "object": "model", "created": started, "owned_by": "nemo_rl_lite"}
        return {"object": "list", "data": [{**described, "max_model_len": max_length}]}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionRequest)

    async def answer(request: Request, kind: type[ApiRequest]) -> Response:
        key = _key(request, gate)
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        asked = read_request(kind, _parsed(body))
        if asked.model not in (None, *names):
            rule = f"unknown model {asked.model!r:.100}; this endpoint serves {names[0]!r}"
            raise RefusedError(404, rule, "model", "model_not_found")
        if asked.stream:
            return await _streamed(request, gate, key, asked)
        answered = asyncio.wrap_future(gate.ask(key, asked))
        try:
            if await _is_gone(request, answered):
                return Response(status_code=_CLIENT_GONE)
            if (refused := _refusal(answered)) is not None:
                raise refused
            return JSONResponse(answered.result())
        finally:
            answered.cancel()

    return app


async def _streamed(request: Request, gate: LoopBridge, key: str, asked: ApiRequest) -> Response:
    """Answer with a stream of chunks. Raises RefusedError: the request fails before its first chunk."""
    loop, chunks = asyncio.get_running_loop(), asyncio.Queue[Chunk | None]()

    def send(chunk: Chunk) -> None:
        loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    answer = asyncio.wrap_future(gate.ask(key, asked, send))
    answer.add_done_callback(lambda _: chunks.put_nowait(None))
    beginning = asyncio.ensure_future(chunks.get())
    if await _is_gone(request, beginning):
        beginning.cancel()
        answer.cancel()
        return Response(status_code=_CLIENT_GONE)
    if (first := beginning.result()) is None and (refused := _refusal(answer)) is not None:
        raise refused

    async def events() -> AsyncIterator[str]:
        try:
            chunk = first
            while chunk is not None:
                yield f"data: {json.dumps(chunk)}\n\n"
                chunk = await chunks.get()
            if (failed := _refusal(answer)) is not None:
                yield f"data: {json.dumps(failed.body())}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            answer.cancel()

    return StreamingResponse(events(), media_type="text/event-stream")


def _parsed(body: bytes) -> Any:
    """Parse a body. Raises RefusedError: not JSON in UTF-8, nested too deeply, or with an unpaired surrogate."""
    try:
        content = json.loads(body.decode("utf-8-sig"))
        if b"\\u" in body:
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    return content


def _key(request: Request, gate: LoopBridge) -> str:
    """Return the key of a request. Raises RefusedError: it is unknown."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not gate.knows(key):
        raise RefusedError(
            401,
            "send a valid key as `Authorization: Bearer KEY`: an agent's endpoint.api_key, valid during its episode, "
            "or the printed token, which is also in the run's endpoint.json",
            code="invalid_api_key",
        )
    return key


def _refusal(answer: asyncio.Future[dict[str, Any]]) -> RefusedError | None:
    """Return why a request has no answer; None if it has one."""
    if answer.cancelled():
        return RefusedError(503, _ASLEEP)
    error = answer.exception()
    if error is None or isinstance(error, RefusedError):
        return error
    return RefusedError(500, f"{type(error).__name__}: {error}")


async def _is_gone(request: Request, awaited: asyncio.Future[Any]) -> bool:
    """Wait for a future; return whether the client disconnects first."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(disconnect())
    try:
        await asyncio.wait({awaited, gone}, return_when=asyncio.FIRST_COMPLETED)
        return not awaited.done()
    finally:
        gone.cancel()


@dataclass(frozen=True)
class ServedGeneration:
    """`Generation` that also answers over HTTP: requests of episodes, and with `responder` those with the token."""

    generation: Generation
    endpoint: Endpoint
    responder: ResponderConfig | None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Requests]:
        async with self.generation.serving() as requests:
            anybody = None if self.responder is None else PublicHandler(self.responder, requests)
            async with self.endpoint.answering(anybody):
                yield requests

    def finish_generation(self) -> dict[str, float]:
        return self.generation.finish_generation()
