"""Environment of the package verifiers, whose loop plays and scores an episode. The policy answers as its client.

Source: verifiers 0.2, `envs/multiturn_env.py` and `clients/client.py`. Later versions run agents against an endpoint
and have no turn-by-turn environments.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.tools import EpisodeError

_INSTALL = "pip install 'verifiers>=0.2,<0.3', and the package of the environment"


class Verifiers:
    """One episode of the verifiers environment `environment`, loaded with `arguments`. `write_rows` writes the rows of
    its dataset to a file."""

    def __init__(self, environment: str, arguments: Mapping[str, Any]):
        """Raises ImportError: the package is not installed. Errors of the environment pass through."""
        self._environment = _loaded(environment, json.dumps(dict(arguments), sort_keys=True))
        self._prompts, self._turns = asyncio.Queue[Sequence[Any]](), asyncio.Queue[Message | None]()
        self._played: asyncio.Task[Mapping[str, Any]] | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools of every prompt."""
        return [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in self._environment.tool_defs or ()
        ]

    async def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """See `Environment.step`."""
        if self._played is None:
            self._played = asyncio.create_task(self._play(problem))
            await self._next_prompt(self._played)
        self._turns.put_nowait(conversation[-1])
        prompt = await self._next_prompt(self._played)
        if prompt is None:
            return Observation(done=True, reward=self._played.result()["reward"])
        new = [message.model_dump(exclude_none=True) for message in prompt[len(conversation) :]]
        if any(message["role"] == "assistant" for message in new) or not new:
            raise EpisodeError("the environment changes earlier turns, but training needs one growing conversation")
        wrong = {call["id"]: call["error"] for call in conversation[-1].get("tool_calls", ()) if "error" in call}
        for message in new:
            if (identity := message.get("tool_call_id")) in wrong:
                message["content"] = f"error: {wrong[identity]}"
        return Observation(tuple(new))

    async def cut_short(self, problem: Problem, conversation: Sequence[Message]) -> float:
        """Tell the environment that the next prompt is too long, and return its reward."""
        if self._played is None:
            raise EpisodeError("the episode has not started")
        self._turns.put_nowait(None)
        return (await self._played)["reward"]

    async def close(self) -> None:
        """End the environment's own loop."""
        if self._played is not None:
            self._played.cancel()
            await asyncio.gather(self._played, return_exceptions=True)

    async def _play(self, problem: Problem) -> Mapping[str, Any]:
        given = {"example_id": 0, **problem.metadata, "prompt": [dict(message) for message in problem.messages]}
        client = _client_class()(self._prompts, self._turns)
        output = await self._environment.run_rollout(given, client, "policy", {})
        if output.get("error"):
            raise EpisodeError(str(output["error"]))
        return output

    async def _next_prompt(self, played: asyncio.Task) -> Sequence[Any] | None:
        """Wait for the environment's next prompt; return the chat so far, or None if the episode is over."""
        asked = asyncio.create_task(self._prompts.get())
        await asyncio.wait({asked, played}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        played.result()
        return None


def write_rows(environment: str, path: str, **arguments: Any) -> None:
    """Write the training rows of a verifiers environment as JSON lines, for data=file."""
    _loaded(environment, json.dumps(arguments, sort_keys=True)).get_dataset().to_json(path)


@cache
def _loaded(environment: str, arguments: str) -> Any:
    try:
        import verifiers

        load = verifiers.load_environment
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{error}: {_INSTALL}") from None
    return load(environment, **json.loads(arguments))


@cache
def _client_class() -> type:
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage, ToolCall

    class PolicyClient(Client):
        """Passes the policy's turns to the environment."""

        def __init__(self, prompts: asyncio.Queue, turns: asyncio.Queue):
            super().__init__(None)
            self._prompts, self._turns = prompts, turns

        async def get_response(self, prompt: Sequence[Any], *arguments: Any, **others: Any) -> Response:
            self._prompts.put_nowait(prompt)
            turn = await self._turns.get()
            if turn is None:
                raise OverlongPromptError
            calls = [
                ToolCall(
                    id=call["id"], name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"])
                )
                for call in turn.get("tool_calls", ())
            ]
            message = ResponseMessage(
                content=turn["content"],
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="policy", created=int(time.time()), model="policy", message=message)

        async def setup_client(self, *unused: Any) -> None:
            """Not called, like the methods below: `get_response` replaces them."""

        to_native_tool = to_native_prompt = get_native_response = setup_client
        raise_from_native_response = from_native_response = close = setup_client

    return PolicyClient
