"""Collects responses that wait for their reward, so that one call judges many."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.rewards.value import RewardError

JudgeBatch = Callable[[Sequence[str], Sequence[Problem]], Awaitable[Sequence[float | RewardError]]]
"""Returns for each response its reward, or why there is none."""

# Seconds that a batch with room waits for more responses.
_WAIT_S = 0.05


@dataclass(eq=False)
class _Waiting:
    response: str
    problem: Problem
    reward: asyncio.Future


class Batches:
    """Gives the responses that wait to `judge`, at most `size` in a call, and in at most `at_once` calls at a time.
    While all calls are under way, responses collect."""

    def __init__(self, judge: JudgeBatch, size: int, at_once: int):
        self._judge, self._size, self._at_once = judge, size, at_once
        self._waiting: list[_Waiting] = []
        self._workers: set[asyncio.Task] = set()

    async def __call__(self, response: str, problem: Problem) -> float | RewardError:
        """Judge a response as a part of a batch. Raises what `judge` raises."""
        own = _Waiting(response, problem, asyncio.get_running_loop().create_future())
        self._waiting.append(own)
        # Workers of an event loop that has ended are done.
        self._workers = {worker for worker in self._workers if not worker.done()}
        if len(self._workers) < self._at_once:
            self._workers.add(asyncio.create_task(self._work()))
        try:
            return await own.reward
        finally:
            # An episode that is cancelled waits no more.
            if own in self._waiting:
                self._waiting.remove(own)

    async def _work(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._size:
                await asyncio.sleep(_WAIT_S)
            batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
            if batch:
                await self._settle(batch)

    async def _settle(self, batch: Sequence[_Waiting]) -> None:
        try:
            rewards = await self._judge([one.response for one in batch], [one.problem for one in batch])
        except Exception as error:  # it belongs to those who wait
            for one in batch:
                if not one.reward.done():
                    one.reward.set_exception(error)
            return
        for one, reward in zip(batch, rewards, strict=True):
            if not one.reward.done():
                one.reward.set_result(reward)
