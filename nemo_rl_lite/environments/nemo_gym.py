"""Environment of a NeMo Gym resources server, which answers the tool calls of an episode and returns its reward.

HTTP protocol: `/seed_session` starts an episode, `/NAME` calls a tool, `/verify` returns the reward; a cookie holds the
session. Rows are NeMo Gym's: `responses_create_params` has prompt and tools, other columns are for the server. Source:
nemo-gym 0.4, `base_resources_server.py` and `responses_api_agents/simple_agent`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.tools import EpisodeError, ToolEnvironment, shortened

# Time limit of the check before a run.
_CHECK_S = 10.0


class NeMoGym(ToolEnvironment):
    """One episode on a resources server. Rows have the tools; the server returns the reward."""

    def __init__(self, url: str, max_characters: int):
        """`url`: the server's, such as `http://localhost:8000`; `max_characters`: limit of a tool's answer. Raises
        ValueError: `url` is not a URL."""
        if not str(url).startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, found {url!r}")
        self._url, self._max_characters = str(url).rstrip("/"), max_characters
        address = urlsplit(self._url)
        # Without credentials.
        self._shown = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
        self._client: Any = None
        # The conversation after the prompt, as items of OpenAI's Responses API.
        self._items: list[dict[str, Any]] = []

    def check(self) -> None:
        """Raise ConnectionError if no server answers."""
        import httpx

        try:
            httpx.get(self._url, timeout=_CHECK_S)
        except httpx.HTTPError as error:
            raise ConnectionError(f"no server answers at {self._shown}: {error}") from None

    async def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """See `Environment.step`."""
        await self._begin(problem)
        self._items += _items(conversation[-1], len(self._items))
        observation = await super().step(problem, conversation)
        for message in observation.messages:
            answered = {"call_id": message["tool_call_id"], "output": message["content"]}
            self._items.append({"type": "function_call_output", **answered})
        return observation

    async def call(self, problem: Problem, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the server's answer, which may be an error message for the model."""
        answer = await self._post(f"/{quote(name, safe='')}", arguments)
        return shortened(answer.text, self._max_characters)

    async def finish(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """End the episode with the server's reward."""
        return Observation(done=True, reward=await self.cut_short(problem, conversation))

    async def cut_short(self, problem: Problem, conversation: Sequence[Message]) -> float:
        """Ask the server for the reward of the episode so far."""
        asked = problem.metadata["responses_create_params"]
        response = {
            "id": "resp_episode",
            "created_at": time.time(),
            "model": "policy",
            "object": "response",
            "output": self._items,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": asked.get("tools") or [],
        }
        answer = await self._post("/verify", {**problem.metadata, "response": response})
        answer.raise_for_status()
        return answer.json()["reward"]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _begin(self, problem: Problem) -> None:
        if self._client is not None:
            return
        import httpx

        if "responses_create_params" not in problem.metadata:
            rule = "the row has no column responses_create_params: use rows of NeMo Gym (data=nemo_gym)"
            raise ValueError(rule)
        # environment.timeout_s is the limit.
        self._client = httpx.AsyncClient(base_url=self._url, timeout=None)
        (await self._post("/seed_session", problem.metadata)).raise_for_status()

    async def _post(self, path: str, content: Mapping[str, Any]) -> Any:
        import httpx

        try:
            return await self._client.post(path, json=dict(content))
        except httpx.HTTPError as error:
            raise EpisodeError(f"{self._shown}{path}: {type(error).__name__}: {error}") from error


def _items(message: Message, count: int) -> list[dict[str, Any]]:
    """Convert an assistant turn to items: its calls, or else its text."""
    calls = message.get("tool_calls", ())
    if not calls:
        thought, found, said = message["content"].rpartition("</think>")
        part = {"type": "output_text", "text": said.strip() if found else said, "annotations": []}
        shown = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
        summary = [{"type": "summary_text", "text": thought.replace("<think>", "").strip()}]
        thoughts = [{"id": f"rs_{count}", "type": "reasoning", "summary": summary}] if found else []
        return [*thoughts, {"id": f"msg_{count}", **shown}]
    return [
        {
            "type": "function_call",
            "id": f"fc_{call['id']}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"]),
            "status": "completed",
        }
        for call in calls
    ]
