"""A small server that follows NeMo Gym's protocol of a resources server: a counter for each session, known by a cookie.

After nemo-gym 0.4, `resources_servers/example_session_state_mgmt`: bodies are checked as its models check them.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from uuid import uuid4

TOOLS = [
    {
        "type": "function",
        "name": "increment",
        "description": "",
        "strict": True,
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    },
    {"type": "function", "name": "value", "description": "", "parameters": {"type": "object", "properties": {}}},
]
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "add 4"}], "tools": TOOLS},
    "initial_count": 3,
    "expected_count": 7,
}


class Handler(BaseHTTPRequestHandler):
    """The server's answers. `server.seen` are the paths and bodies of all requests."""

    def do_GET(self):
        self._answer(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = (self.headers.get("Cookie") or "").removeprefix("gym=") or uuid4().hex
        self.server.seen.append((self.path, body))
        counts = self.server.counts
        match self.path:
            case "/seed_session":
                counts[session] = body["initial_count"]
                self._answer(200, {}, session)
            case "/increment" if self.server.is_broken:
                self._answer(500, "ValueError('broken')", session)
            case "/increment" if body["count"] == 600:
                time.sleep(600)
            case "/increment":
                counts[session] += body["count"]
                self._answer(200, {"success": True}, session)
            case "/value":
                self._answer(200, {"count": counts[session]}, session)
            case "/verify":
                response = body["response"]
                needed = {
                    "id",
                    "created_at",
                    "model",
                    "object",
                    "output",
                    "parallel_tool_calls",
                    "tool_choice",
                    "tools",
                }
                assert needed <= response.keys() and body["responses_create_params"]
                self._answer(200, {**body, "reward": float(counts[session] == body["expected_count"])}, session)
            case _:
                self._answer(404, {"detail": "Not Found"}, session)

    def log_message(self, *unused):
        """Say nothing."""

    def _answer(self, status: int, content: object, session: str = ""):
        text = json.dumps(content).encode()
        self.send_response(status)
        if session:
            self.send_header("Set-Cookie", f"gym={session}; path=/; httponly; samesite=lax")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving() -> Iterator[ThreadingHTTPServer]:
    """Run the server; `url` is where."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    server.counts, server.seen, server.is_broken = {}, [], False
    server.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
