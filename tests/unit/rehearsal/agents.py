"""Agents and an environment with one bug each, and good ones. They run in processes of their own."""

import asyncio
import itertools
import json
import random
import subprocess
import tempfile
import urllib.request

import httpx

from nemo_rl_lite.environments.interface import Observation

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
AGAIN = {"role": "user", "content": "again"}
MEMORY: list[dict] = []


async def ask(endpoint, messages, **more):
    async with httpx.AsyncClient(timeout=20) as client:
        keys, body = {"Authorization": f"Bearer {endpoint.api_key}"}, {"model": endpoint.model, "messages": messages}
        said = await client.post(f"{endpoint.base_url}/chat/completions", json=body | more, headers=keys)
    if said.status_code != 200:
        raise ValueError(said.json()["error"]["message"])
    return said.json()["choices"][0]["message"]


def ask_and_block(endpoint, messages):
    body = json.dumps({"model": endpoint.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as said:
        return json.load(said)["choices"][0]["message"]


async def player(problem, endpoint, bug=""):
    """Ask twice; the reward is the share of right answers."""
    messages, right = list(problem.messages), []
    if bug == "silent":
        return 1.0
    if bug == "shares state":
        MEMORY.extend(messages)
        messages = MEMORY
    if bug == "leaves processes":
        subprocess.Popen(["sleep", "60"])
    if bug == "leaves files":
        tempfile.mkdtemp()
    for _ in itertools.count() if bug == "endless" else range(3 if bug.startswith("changes") else 2):
        if bug == "random":
            messages.append({"role": "user", "content": str(random.random())})
        if bug == "temperature":
            said = await ask(endpoint, messages, temperature=0.3)
        elif bug == "retries":
            while True:
                try:
                    said = await ask(endpoint, messages, n=2)
                    break
                except ValueError:
                    await asyncio.sleep(0.2)
        elif bug == "blocks":
            said = ask_and_block(endpoint, messages)
        else:
            said = await ask(endpoint, messages)
        answer = said["content"]
        if bug == "needs text" and not answer:
            raise IndexError("no words")
        if bug == "needs a number":
            int(answer)
        right.append(answer.strip() == problem.answer)
        messages += [{"role": "assistant", "content": answer}, AGAIN]
        if bug == "changes answers":
            messages[-2]["content"] = "I said something."
        if bug == "changes the first message":
            messages[0] = {"role": "user", "content": f"{problem.messages[0]['content']} ({len(messages)} messages)"}
        if bug == "slow":
            await asyncio.sleep(1.5)
        if bug == "endless":
            messages = messages[:1]
    if bug == "no number":
        return "well done"
    if bug == "not finite":
        return float("nan")
    return 1.0 if bug == "always pays" else sum(right) / len(right)


def plain(problem, endpoint):
    """The same in plain code."""
    return asyncio.run(player(problem, endpoint))


async def tool_player(problem, endpoint, bug=""):
    """Offer a tool, and answer calls up to twice."""
    messages = list(problem.messages)
    for _ in range(3):
        said = await ask(endpoint, messages, tools=[TOOL])
        calls = said.get("tool_calls") or []
        if not calls:
            break
        if bug == "needs known tools":
            assert calls[0]["function"]["name"] == "add", "unknown tool"
        messages.append(said)
        if bug == "ignores calls":
            messages.append(AGAIN)
        else:
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in calls]
    return float(said["content"] == problem.answer)


class Room:
    """An environment that talks too much, or never ends."""

    def __init__(self, bug=""):
        self._bug = bug

    def step(self, problem, conversation):
        if self._bug == "too long":
            return Observation(({"role": "user", "content": "1" * 200},))
        if self._bug == "wrong role":
            return Observation(({"role": "human", "content": "1"},))
        if self._bug == "never done":
            return Observation(({"role": "user", "content": "1"},))
        return Observation(done=True, reward=float(conversation[-1]["content"] == problem.answer))
