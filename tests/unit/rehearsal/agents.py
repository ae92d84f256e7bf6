"""Agents and an environment, good ones if `bugs` are empty. They run in separate processes."""

import asyncio
import itertools
import json
import random
import subprocess
import tempfile
import urllib.request
from pathlib import Path

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
REWARDS: dict[str, float] = {}
LOCKED: list = []


async def ask(endpoint, messages, **more):
    # Certificates take long to read.
    async with httpx.AsyncClient(timeout=20, verify=False) as client:
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


async def player(problem, endpoint, bugs=()):
    """Ask three times; the reward is the share of right answers."""
    messages, right = list(problem.messages), []
    if "silent" in bugs:
        return 1.0
    if "leaks the answer" in bugs:
        messages[0] = {"role": "user", "content": f"{messages[0]['content']} is {problem.answer}"}
    if "shares state" in bugs:
        MEMORY.extend(messages)
        messages = MEMORY
    if "locks" in bugs and not LOCKED:
        LOCKED.append((Path(tempfile.gettempdir()) / "lock").open("x"))
    if "leaves processes" in bugs:
        subprocess.Popen(["sleep", "60"])
    if "leaves files" in bugs:
        tempfile.mkdtemp()
    helper = subprocess.Popen(["sleep", "60"]) if "ends its process only after a response" in bugs else None
    for _ in itertools.count() if "endless" in bugs else range(3):
        if "random" in bugs:
            messages.append({"role": "user", "content": str(random.random())})
        if "temperature" in bugs:
            said = await ask(endpoint, messages, temperature=0.3)
        elif "retries" in bugs or "goes on" in bugs:
            while True:
                try:
                    said = await ask(endpoint, messages, **({"seed": 1} if "retries" in bugs else {}))
                    break
                except ValueError:
                    await asyncio.sleep(0.2)
        elif "blocks" in bugs:
            said = ask_and_block(endpoint, messages)
        else:
            said = await ask(endpoint, messages)
        answer = said["content"]
        if "needs text" in bugs and not answer:
            raise IndexError("no words")
        if "needs a number" in bugs:
            int(answer)
        right.append(answer.strip() == problem.answer)
        messages += [{"role": "assistant", "content": answer}, AGAIN]
        if "changes answers" in bugs:
            messages[-2]["content"] = "I said something."
        if "changes the first message" in bugs:
            messages[0] = {"role": "user", "content": f"{problem.messages[0]['content']} ({len(messages)} messages)"}
        if "endless" in bugs:
            messages = messages[:1]
    if helper is not None:
        helper.kill()
        helper.wait()
    if "no number" in bugs:
        return "well done"
    if "not finite" in bugs:
        return float("nan")
    reward = sum(right) / len(right)
    if "always pays" in bugs:
        return 1.0
    if "wrong sign" in bugs:
        return -reward
    if "random reward" in bugs:
        return reward + random.random()
    return REWARDS.setdefault(problem.answer, reward) if "remembers rewards" in bugs else reward


def plain(problem, endpoint):
    """The same in plain code."""
    return asyncio.run(player(problem, endpoint))


async def tool_player(problem, endpoint, bugs=()):
    """Offer a tool, and answer calls up to twice."""
    messages = list(problem.messages)
    for _ in range(3):
        said = await ask(endpoint, messages, tools=[TOOL])
        calls = said.get("tool_calls") or []
        if not calls and "drops texts" in bugs:
            messages.append(AGAIN)
            continue
        if not calls:
            break
        if "needs known tools" in bugs:
            assert calls[0]["function"]["name"] == "add", "unknown tool"
        messages.append(said)
        if "ignores calls" in bugs:
            messages.append(AGAIN)
        else:
            result = "1" * 120 if "long results" in bugs else "42"
            ids = ["call" if "wrong ids" in bugs else call["id"] for call in calls]
            messages += [{"role": "tool", "tool_call_id": one, "content": result} for one in ids]
    return float(said["content"] == problem.answer)


class Room:
    """An environment that talks too much, or never ends."""

    def __init__(self, bugs=()):
        self._bugs = bugs

    def step(self, problem, conversation):
        if "too long" in self._bugs:
            return Observation(({"role": "user", "content": "1" * 200},))
        if "wrong role" in self._bugs:
            return Observation(({"role": "human", "content": "1"},))
        if "never done" in self._bugs:
            return Observation(({"role": "user", "content": "1"},))
        return Observation(done=True, reward=float(conversation[-1]["content"] == problem.answer))
