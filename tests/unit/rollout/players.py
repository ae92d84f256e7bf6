"""Agents for tests, which run in processes of their own; each plays in a way that its argument names."""

import asyncio
import os
from contextlib import suppress

import httpx

TOOL = {"role": "user", "content": "42"}


class Endpoint:
    """A plain client of one episode."""

    def __init__(self, endpoint):
        self._url, self._keys = endpoint.base_url, {"Authorization": f"Bearer {endpoint.api_key}"}
        self._model = endpoint.model

    async def ask(self, messages, timeout=60, **parameters):
        said = await self.post("chat/completions", timeout, messages=messages, **parameters)
        return said["choices"][0]["message"]

    async def post(self, path, timeout=60, **parameters):
        body = {"model": self._model, **parameters}
        async with httpx.AsyncClient(timeout=timeout) as client:
            said = await client.post(f"{self._url}/{path}", json=body, headers=self._keys)
        if said.status_code != 200:
            raise ValueError(said.json()["error"]["message"])
        return said.json()


async def player(problem, endpoint, how):
    """What an agent may do; a calculator's two turns where nothing else is named."""
    ask, messages = Endpoint(endpoint).ask, list(problem.messages)
    if how == "silent":
        return 1.0
    if how == "late":
        await asyncio.sleep(600)
    first = await ask(messages)
    match how:
        case "raises":
            raise KeyError("state")
        case "dies":
            os._exit(7)
        case "no number":
            return "well done"
        case "judged":
            return None
        case "hot":
            await ask([*messages, first, TOOL], temperature=0.5)
        case "several":
            await ask([*messages, first, TOOL], n=2)
        case "stops":
            await ask([*messages, first, TOOL], stop="=")
        case "offers":
            await ask([*messages, first, TOOL], tools=[{"type": "function", "function": {"name": "add"}}])
        case "text":
            await Endpoint(endpoint).post("completions", prompt="6*7=")
        case "rewrites":
            await ask([{"role": "user", "content": "another question"}, first, TOOL])
        case "repeats":
            await ask(messages)
        case "prefills":
            await ask([*messages, first, {"role": "assistant", "content": "4"}, TOOL])
        case "leaves":
            while True:
                with suppress(httpx.TimeoutException):
                    await ask([*messages, first, TOOL], timeout=1)
                    return 1.0
        case "endless":
            while True:
                messages += [first, TOOL]
                first = await ask(messages)
    trimmed = {"role": "assistant", "content": f" {first['content']}\n"}
    last = await ask([*messages, trimmed, TOOL], temperature=1.0, max_tokens=40)
    return float(last["content"] == problem.answer)


def plain(problem, endpoint):
    """The same in plain code."""
    return asyncio.run(player(problem, endpoint, "two turns"))
