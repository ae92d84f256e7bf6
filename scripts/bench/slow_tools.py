"""Environments that take a second for each answer, for rollout_tools.py."""

import asyncio
import time
from collections.abc import Sequence

from nemo_rl_lite.data.problems import Message, Problem
from nemo_rl_lite.environments.interface import Observation

TOOL_S = 1.0


class PlainTool:
    """Answers every turn after a second; the limit on turns ends the episode."""

    def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        time.sleep(TOOL_S)
        return Observation(({"role": "user", "content": "1"},), reward=float(len(conversation) > 2))


class AsyncTool:
    """The same, as a coroutine."""

    async def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        await asyncio.sleep(TOOL_S)
        return Observation(({"role": "user", "content": "1"},), reward=float(len(conversation) > 2))
