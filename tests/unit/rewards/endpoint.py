"""A local server that speaks as much of OpenAI's protocol as a judge needs, and can fail in every way."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Server(ThreadingHTTPServer):
    # A rollout's samples may all connect at the same time; the default of 5 refuses some of them.
    request_queue_size = 256
    daemon_threads = True


class Endpoint:
    """Answers each request with `answer`, a text or a function of the prompt; keeps prompts in `asked` and what came as
    a key in `keys`. `mode`, or what it returns for a prompt, is how it behaves: answer, hang, fail (status 500), refuse
    (401), html, or other JSON."""

    def __init__(self) -> None:
        self.answer: str | Callable[[str], str] | None = "Score: 8"
        self.mode: str | Callable[[str], str] = "answer"
        self.asked: list[str] = []
        self.keys: list[str | None] = []
        self._ended = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                endpoint._respond(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Be gone: connections are refused from now on."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        prompt = request["messages"][-1]["content"]
        self.asked.append(prompt)
        self.keys.append(handler.headers["authorization"])
        mode = self.mode(prompt) if callable(self.mode) else self.mode
        if mode == "hang":
            self._ended.wait(600)
            # Otherwise the connection would stay, and its client would wait on.
            handler.close_connection = True
            return
        if mode in ("fail", "refuse"):
            handler.send_error(500 if mode == "fail" else 401)
            return
        text = self.answer(prompt) if callable(self.answer) else self.answer
        content = {"choices": [{"message": {"role": "assistant", "content": text}}]} if mode == "answer" else {}
        body = b"<html></html>" if mode == "html" else json.dumps(content).encode()
        handler.send_response(200)
        handler.send_header("content-type", "text/html" if mode == "html" else "application/json")
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    """An endpoint that is there within the block."""
    one = Endpoint()
    try:
        yield one
    finally:
        one.close()
