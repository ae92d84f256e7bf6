"""Agents for tests, which run in processes of their own; each plays in a way that its argument names."""

import asyncio
import json
import os
from contextlib import suppress

import httpx
from openai import AsyncOpenAI

from nemo_rl_lite.environments.agents import Outcome

TOOL = {"role": "user", "content": "42"}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


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
        case "reports":
            return Outcome(0.5, {"tool calls": 3, "pass@1": True})
        case "reports text":
            return Outcome(0.5, {"tool calls": "three"})
        case "hot":
            await ask([*messages, first, TOOL], temperature=0.5)
        case "asks for choices":
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
        case "compacts":
            await ask([*messages, first, TOOL])
            messages = [{"role": "user", "content": "so far"}]
            first = await ask(messages)
        case "delegates":
            one, other = [*messages, first, {"role": "user", "content": "sub"}], [{"role": "user", "content": "new"}]
            await asyncio.gather(ask(one), ask(one), ask(other))
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
    if how == "by turn":
        return [0.25, float(last["content"] == problem.answer)]
    if how == "too few":
        return [1.0]
    return float(last["content"] == problem.answer)


async def chooser(problem, endpoint, streams):
    """Ask for three choices; the reward of each is its number."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    asked = {"model": endpoint.model, "messages": list(problem.messages), "n": 3}
    if not streams:
        return [float(one.message.content) for one in (await client.chat.completions.create(**asked)).choices]
    texts = ["", "", ""]
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return [float(text) for text in texts]


def plain(problem, endpoint):
    """The same in plain code."""
    return asyncio.run(player(problem, endpoint, "two turns"))


class ToolUser:
    """One client with a tool for each API. Each method returns text and arguments of a response, and what the next
    request has more than this one."""

    def __init__(self, endpoint, streams: bool):
        self._endpoint, self._streams, self.pieces = endpoint, streams, 0

    async def chat(self, messages):
        client = AsyncOpenAI(base_url=self._endpoint.base_url, api_key=self._endpoint.api_key, max_retries=0)
        tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADD}}
        asked = {"model": self._endpoint.model, "messages": messages, "tools": [tool]}
        if self._streams:
            async with client.chat.completions.stream(**asked) as stream:
                async for event in stream:
                    self.pieces += event.type == "content.delta"
            said = (await stream.get_final_completion()).choices[0].message
        else:
            said = (await client.chat.completions.create(**asked)).choices[0].message
        call = said.tool_calls[0] if said.tool_calls else None
        results = [] if call is None else [{"role": "tool", "tool_call_id": call.id, "content": "42"}]
        return (
            said.content,
            call and json.loads(call.function.arguments),
            [said.model_dump(exclude_none=True), *results],
        )

    async def responses(self, messages):
        client = AsyncOpenAI(base_url=self._endpoint.base_url, api_key=self._endpoint.api_key, max_retries=0)
        tool = {"type": "function", "name": "add", "description": "adds", "parameters": ADD}
        asked = {"model": self._endpoint.model, "input": messages, "tools": [tool]}
        if self._streams:
            async with client.responses.stream(**asked) as stream:
                async for event in stream:
                    self.pieces += event.type == "response.output_text.delta"
                said = await stream.get_final_response()
        else:
            said = await client.responses.create(**asked)
        call = next((item for item in said.output if item.type == "function_call"), None)
        output = {"type": "function_call_output", "call_id": call and call.call_id, "output": "42"}
        items = [item.to_dict() for item in said.output]
        return said.output_text, call and json.loads(call.arguments), [*items, *([output] if call else [])]

    async def messages(self, messages):
        from anthropic import AsyncAnthropic

        client = AsyncAnthropic(
            base_url=self._endpoint.anthropic_base_url, api_key=self._endpoint.api_key, max_retries=0
        )
        tool = {"name": "add", "description": "adds", "input_schema": ADD}
        asked = {"model": self._endpoint.model, "messages": messages, "tools": [tool], "max_tokens": 20}
        if self._streams:
            async with client.messages.stream(**asked) as stream:
                async for _ in stream.text_stream:
                    self.pieces += 1
                said = await stream.get_final_message()
        else:
            said = await client.messages.create(**asked)
        call = next((block for block in said.content if block.type == "tool_use"), None)
        text = "".join(block.text for block in said.content if block.type == "text")
        result = {"type": "tool_result", "tool_use_id": call and call.id, "content": "42"}
        turn = {"role": "assistant", "content": [block.to_dict() for block in said.content]}
        return text, call and call.input, [turn, *([{"role": "user", "content": [result]}] if call else [])]


async def tool_player(problem, endpoint, api, streams=False, change=None):
    """Call the tool and tell its answer; the reward counts the pieces of a stream. `change` names what the second
    request changes."""
    user, messages = ToolUser(endpoint, streams), list(problem.messages)
    _, arguments, more = await getattr(user, api)(messages)
    if arguments != {"a": 41}:
        raise ValueError(f"the call has the arguments {arguments}")
    call = more[0]["tool_calls"][0] if change else {}
    match change:
        case "nothing that matters":
            call["index"], more[0]["content"], more[0]["reasoning_content"] = 0, "", "dropped"
            call["function"]["arguments"] = json.dumps(arguments, indent=2)
            del call["type"]
        case "id":
            call["id"] = "another"
        case "arguments":
            call["function"]["arguments"] = '{"a": 42}'
        case "call":
            del more[0]["tool_calls"]
            more[0]["content"] = "I called add(41)."
        case "tools":
            ADD["properties"]["b"] = {"type": "integer"}
        case "system":
            messages.insert(0, {"role": "system", "content": "Be brief."})
    said, _, _ = await getattr(user, api)([*messages, *more])
    return user.pieces + float(said == "42")
