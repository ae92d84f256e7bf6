"""`nrl-lite serve RUN [key.path=value ...]`: serve a model over the APIs of OpenAI and Anthropic."""

import argparse
import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from nemo_rl_lite.config.schema import ServeConfig
from nemo_rl_lite.errors import ConfigError, UsageError, shown_as_message
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.run.serving import find_served, model_parser, start_engine
from nemo_rl_lite.serving.public import PublicHandler, ResponderConfig
from nemo_rl_lite.serving.server import Endpoint, bound_socket


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 after Ctrl-C, 1 no model, 2 bad arguments."""
    parser = model_parser("nrl-lite serve", __doc__, "all that fit into the model's context")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=_port, help="port to listen on (default: a free one)")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in requests (default: its folder's)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        type=_key,
        default=os.environ.get("VLLM_API_KEY"),
        help="key that requests need (default: VLLM_API_KEY, or a new key); other users of this machine can read the "
        "command line, but not the variable",
    )
    given = parser.parse_intermixed_args(arguments)
    with shown_as_message("nrl-lite serve"):
        served = find_served(given, _tell)
        names = [given.served_model_name] if given.served_model_name else [served.name, *served.other_names]
        # Bind before the model loads, so that a port in use fails at once.
        with _bound(given.host, given.port) as bound:
            _tell(f"starting {served}")
            queue, responder = start_engine(served)
            endpoint = Endpoint(bound, responder.tokenizer, names, responder.max_length, given.api_key)
            with endpoint.running():
                asyncio.run(_answer(endpoint, queue, responder))


async def _answer(endpoint: Endpoint, queue: RequestQueue, responder: ResponderConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with queue.serving() as requests, endpoint.answering(PublicHandler(responder, requests)):
        sys.stdout.write(f"OPENAI_BASE_URL={endpoint.url}\nOPENAI_API_KEY={endpoint.token}\n")
        anthropic = endpoint.url.removesuffix("/v1")
        sys.stdout.write(f"ANTHROPIC_BASE_URL={anthropic}\nANTHROPIC_AUTH_TOKEN={endpoint.token}\n")
        sys.stdout.flush()
        _tell(f"serving the model {endpoint.model!r} until Ctrl-C")
        await stopped.wait()


@contextmanager
def _bound(host: str, port: int | None) -> Iterator[socket.socket]:
    """Yield a socket at the address. Raises LauncherError: the address cannot be used."""
    with ExitStack() as stack:
        try:
            bound = stack.enter_context(bound_socket(ServeConfig(True, host, port)))
        except ConfigError as error:
            (violation,) = error.violations
            fix = "name another --port, or none for a free one" if port else "name another --host"
            raise UsageError(f"nrl-lite serve: {violation.value}: {violation.rule}; {fix}") from None
        yield bound


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port: give a number from 1 to 65535")
    return int(text)


def _key(text: str) -> str:
    if not re.fullmatch("[!-~]+", text):
        what = "has characters other than visible ASCII, which a header cannot carry" if text else "is empty"
        fix = "choose another, or unset --api-key and VLLM_API_KEY for a new key"
        raise argparse.ArgumentTypeError(f"the key {what}: {fix}")
    return text


def _tell(message: str) -> None:
    sys.stderr.write(f"{message}\n")


if __name__ == "__main__":
    main()
