"""`nrl-lite chat RUN [key.path=value ...]`: chat with a trained model, or one in a Hugging Face folder.

Each line is a message. /reset starts a new conversation, /quit ends. Responses go to standard output.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from rich.console import Console

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.errors import printable, shown_as_message
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.run.serving import find_served, model_parser, start_engine
from nemo_rl_lite.serving.protocol import ChatRequest, RefusedError
from nemo_rl_lite.serving.public import PublicHandler, ResponderConfig

_RESPONSE_TOKENS = 1024
_RESET, _QUIT = "/reset", "/quit"
Reply = Callable[[Sequence[Message]], str]
"""Returns the response to a conversation. Raises RefusedError: the request is invalid or too long."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 done, 1 no model, or a line of a file got no response, 2 bad arguments."""
    given = model_parser("nrl-lite chat", __doc__, str(_RESPONSE_TOKENS)).parse_intermixed_args(arguments)
    console = Console(stderr=True, highlight=False, markup=False)
    with shown_as_message("nrl-lite chat"):
        served = find_served(given, console.print, _RESPONSE_TOKENS)
        with console.status(f"starting {served}"):
            queue, responder = start_engine(served)
        if sys.stdin.isatty():
            console.print(f"{served}; {_RESET} starts a new conversation, {_QUIT} or Ctrl-D ends")
        try:
            refused = converse(replier(queue, responder, console.print), console)
        except KeyboardInterrupt:
            refused = 0
    sys.exit(1 if refused and not sys.stdin.isatty() else 0)


def replier(queue: RequestQueue, responder: ResponderConfig, say: Callable[[str], None]) -> Reply:
    """Return a function that asks the engine and reports truncated responses."""

    async def reply(messages: Sequence[Message]) -> str:
        asked = ChatRequest(messages=list(messages))
        async with queue.serving() as requests:
            answer = await PublicHandler(responder, requests).respond(asked)
        (completion,) = answer.completions
        if completion.finish_reason == "length":
            say(f"truncated after {len(completion.tokens)} tokens; raise --max-new-tokens")
        return responder.tokenizer.text(completion.tokens)

    return lambda messages: asyncio.run(reply(messages))


def converse(reply: Reply, console: Console) -> int:
    """Read messages and write responses until the input ends; return the number of messages without a response."""
    messages, refused, at_terminal = list[Message](), 0, sys.stdin.isatty()
    while True:
        try:
            said = input("> " if at_terminal else "").strip()
        except EOFError:
            return refused
        if said == _QUIT:
            return refused
        if said == _RESET:
            messages.clear()
        elif said.startswith("/"):
            console.print(f"unknown command {said.split()[0]}; use {_RESET} or {_QUIT}")
        elif said:
            messages.append({"role": "user", "content": said})
            try:
                with console.status("...") if at_terminal else nullcontext():
                    response = reply(messages)
            except RefusedError as error:
                refused += 1
                messages.pop()
                console.print(f"{error}. {_RESET} starts a new conversation")
                continue
            messages.append({"role": "assistant", "content": response})
            shown = printable(response, kept="\n\t") if sys.stdout.isatty() else response
            sys.stdout.write(f"{shown}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
