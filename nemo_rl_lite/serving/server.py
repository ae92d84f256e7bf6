"""Serves the APIs: an HTTP server in a thread, and the bridge to the engines' event loop."""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
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
from nemo_rl_lite.serving.anthropic_messages import MessagesExchange
from nemo_rl_lite.serving.connections import BoundedProtocol
from nemo_rl_lite.serving.exchange import Event, Exchange
from nemo_rl_lite.serving.openai_completions import ChatExchange, CompletionExchange
from nemo_rl_lite.serving.openai_responses import ResponsesExchange
from nemo_rl_lite.serving.protocol import ApiRequest, CompletionHandler, RefusedError, tokenized
from nemo_rl_lite.serving.public import PublicHandler, ResponderConfig

_ASLEEP = "the engines are paused while the policy trains or refits them: try again during the next rollout"
_OVER = "the episode of this key has ended"
# nginx's status for a disconnected client, which no one reads.
_CLIENT_GONE = 499
# Seconds for the server to end.
_LIMIT_S = 30.0
_COUNT = "/v1/messages/count_tokens"
_APIS: dict[str, type[Exchange[Any]]] = {
    "/v1/chat/completions": ChatExchange,
    "/v1/completions": CompletionExchange,
    "/v1/responses": ResponsesExchange,
    "/v1/messages": MessagesExchange,
    _COUNT: MessagesExchange,
}
_ANSWERED = f"{', '.join(f'POST {path}' for path in _APIS)}, GET /v1/models, GET /v1/models/NAME and GET /health"
Send = Callable[[Event], None]
_EVERYWHERE = ("0.0.0.0", "::", "")


@dataclass(eq=False)
class _Session:
    """The handler of a key, and its unfinished requests."""

    handler: CompletionHandler
    tasks: set[asyncio.Task] = field(default_factory=set)


class LoopBridge:
    """Passes requests from the server's thread to the handler of their key, in the engines' event loop."""

    def __init__(self, token: str, tokenizer: ChatTokenizer, max_length: int):
        """`token`: a key that is valid even while the gate is closed."""
        self._token, self._tokenizer, self._max_length = token, tokenizer, max_length
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

    def ask(self, key: str, exchange: Exchange, send: Send | None = None) -> Future[dict[str, Any]]:
        """Hand over a request from the server's thread. Cancelling the future aborts it. `send` receives the events of
        a stream, in the engines' thread. Raises RefusedError: the gate is closed."""
        return self._started(lambda: self._answer(key, exchange, send))

    def count(self, asked: ApiRequest) -> Future[int]:
        """Count the tokens of a request's prompt. Raises RefusedError: the gate is closed."""
        return self._started(lambda: self._count(asked))

    def _started[T](self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        with self._lock:
            if self._loop is None:
                raise RefusedError(503, _ASLEEP)
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    async def _count(self, asked: ApiRequest) -> int:
        tokenizer = self._tokenizer
        (prompt,) = await tokenized(asked, lambda: asked.prompts(tokenizer), tokenizer, self._max_length)
        return len(prompt)

    async def _answer(self, key: str, exchange: Exchange, send: Send | None) -> dict[str, Any]:
        try:
            return await self._answered(key, exchange, send)
        except asyncio.CancelledError:
            if key in self._sessions:
                raise
            raise self._unavailable(key) from None

    def _unavailable(self, key: str) -> RefusedError:
        """Return why a key has no session. Clients send a request again after status 503, but not after 410."""
        return RefusedError(503, _ASLEEP) if key == self._token else RefusedError(410, _OVER, code="episode_ended")

    async def _answered(self, key: str, exchange: Exchange, send: Send | None) -> dict[str, Any]:
        session = self._sessions.get(key)
        if session is None or not self.is_open:
            raise self._unavailable(key)
        task = asyncio.current_task()
        if task is not None:
            session.tasks.add(task)
            task.add_done_callback(session.tasks.discard)
        if send is None:
            return exchange.body(await session.handler.respond(exchange.asked))

        failed: list[Exception] = []

        def tell(index: int, so_far: Completion) -> None:
            if failed:
                return
            try:
                for event in exchange.begun(index, so_far):
                    send(event)
            except Exception as error:  # ends this request, and not the engines' queue
                failed.append(error)

        answer = await session.handler.respond(exchange.asked, tell)
        if failed:
            raise failed[0]
        for event in exchange.ended(answer):
            send(event)
        return {}


class Endpoint:
    """The APIs of a run's engines."""

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
        self._bound, self._tokenizer, self._models, self._max_length = bound, tokenizer, models, max_length
        self.gate = LoopBridge(self.token, tokenizer, max_length)

    @property
    def url(self) -> str:
        """Return the base URL for clients on this machine."""
        return self.url_at("127.0.0.1")

    def url_at(self, machine: str) -> str:
        """Return the base URL. `machine`: address of this machine, for an endpoint that listens on all addresses."""
        host, port = self._bound.getsockname()[:2]
        shown = machine if host in _EVERYWHERE else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"

    @contextmanager
    def running(self) -> Iterator["Endpoint"]:
        """Run the server during the block."""
        options = uvicorn.Config(
            _application(self.gate, self._tokenizer, self._models, self._max_length),
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


def _application(gate: LoopBridge, tokenizer: ChatTokenizer, names: Sequence[str], max_length: int) -> FastAPI:
    """Return the routes of the server. All except `/health` need a key."""
    app = FastAPI(openapi_url=None)
    described = {"id": names[0], "object": "model", "created": int(time.time()), "owned_by": "nemo_rl_lite"}
    described["max_model_len"] = max_length

    def check_name(name: str | None) -> None:
        if name not in (None, *names):
            rule = f"unknown model {name!r:.100}; this endpoint serves {names[0]!r}"
            raise RefusedError(404, rule, "model", "model_not_found")

    @app.exception_handler(RefusedError)
    async def refuse(request: Request, refused: RefusedError) -> JSONResponse:
        return _refused(request, refused, {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {})

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
        rule = f"unknown route {request.method} {request.url.path}; known are {_ANSWERED}"
        return _refused(request, RefusedError(error.status_code, rule), error.headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"engines": "generating" if gate.is_open else "asleep"}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _key(request, gate)
        return {"object": "list", "data": [described]}

    # A name may be a path.
    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        _key(request, gate)
        check_name(name)
        return described

    async def answer(request: Request) -> Response:
        key = _key(request, gate)
        try:
            content = _parsed(await request.body())
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        exchange = _APIS[request.url.path].read(content, tokenizer, names[0])
        check_name(exchange.asked.model)
        if request.url.path == _COUNT:
            return await _awaited(request, gate.count(exchange.asked), lambda tokens: {"input_tokens": tokens})
        if exchange.asked.stream:
            return await _streamed(request, gate, key, exchange)
        return await _awaited(request, gate.ask(key, exchange))

    for path in _APIS:
        app.add_api_route(path, answer, methods=["POST"])
    return app


def _refused(request: Request, refused: RefusedError, headers: Mapping[str, str] | None) -> JSONResponse:
    """Return a rejection in the form of the request's API."""
    api = _APIS.get(request.url.path, ChatExchange)
    return JSONResponse(api.refusal(refused), refused.status, headers)


async def _awaited[T](
    request: Request, asked: Future[T], body: Callable[[T], Any] = lambda answered: answered
) -> Response:
    """Answer with the body of a result. Raises RefusedError: there is none."""
    answered = asyncio.wrap_future(asked)
    try:
        if await _is_gone(request, answered):
            return Response(status_code=_CLIENT_GONE)
        if (refused := _refusal(answered)) is not None:
            raise refused
        return JSONResponse(body(answered.result()))
    finally:
        answered.cancel()


async def _streamed(request: Request, gate: LoopBridge, key: str, exchange: Exchange) -> Response:
    """Answer with a stream of events. Raises RefusedError: the request fails before its first event."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | None]()

    def send(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    answer = asyncio.wrap_future(gate.ask(key, exchange, send))
    answer.add_done_callback(lambda _: events.put_nowait(None))
    beginning = asyncio.ensure_future(events.get())
    if await _is_gone(request, beginning):
        beginning.cancel()
        answer.cancel()
        return Response(status_code=_CLIENT_GONE)
    if (first := beginning.result()) is None and (refused := _refusal(answer)) is not None:
        raise refused

    async def written() -> AsyncIterator[str]:
        try:
            event = first
            while event is not None:
                yield _written(event)
                event = await events.get()
            if (failed := _refusal(answer)) is not None:
                yield _written(exchange.failed(failed))
            yield exchange.stream_end
        finally:
            answer.cancel()

    return StreamingResponse(written(), media_type="text/event-stream")


def _written(event: Event) -> str:
    """Return a server-sent event."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


def _parsed(body: bytes) -> Any:
    """Parse a body. Raises RefusedError: not JSON in UTF-8, nested too deeply, or with NaN or an unpaired surrogate."""

    def refuse(constant: str) -> None:
        raise ValueError(f"it has {constant}")

    try:
        content = json.loads(body.decode("utf-8-sig"), parse_constant=refuse)
        if b"\\u" in body:
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    return content


def _key(request: Request, gate: LoopBridge) -> str:
    """Return the key of a request. Raises RefusedError: it is unknown."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    key = key if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    if not gate.knows(key):
        raise RefusedError(
            401,
            "send a valid key as `Authorization: Bearer KEY` or `x-api-key: KEY`: an agent's endpoint.api_key, valid "
            "during its episode, or the printed token, which is also in the run's endpoint.json",
            code="invalid_api_key",
        )
    return key


def _refusal(answer: asyncio.Future[Any]) -> RefusedError | None:
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
