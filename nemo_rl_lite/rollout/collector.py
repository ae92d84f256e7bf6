"""Problems -> sampled and judged episodes, whatever the engine. Each episode is a coroutine."""

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Generation, Request, Requests, Sampling
from nemo_rl_lite.host.calls import CallError
from nemo_rl_lite.observability import limits
from nemo_rl_lite.rewards.judge import Judge
from nemo_rl_lite.rewards.registry import RewardError, WrongReward
from nemo_rl_lite.rollout.episode import Activity, Episode, Span
from nemo_rl_lite.rollout.prompts import check_length
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.turns import Turns

log = logging.getLogger(__name__)

# Seconds between two signs of life of the launcher, while it waits for engines, environments and rewards.
_ALIVE_S = 0.5


@dataclass(frozen=True)
class ErrorShares:
    """The largest shares of a rollout's episodes whose reward, and whose environment, may fail."""

    reward: float
    environment: float


@dataclass
class _Failures:
    """Errors of one kind in a rollout: the first is logged, all are counted."""

    what: str
    key: str
    limit: float
    errors: list[Exception] = field(default_factory=list)

    def add(self, error: Exception, episode: Episode) -> None:
        self.errors.append(error)
        if len(self.errors) == 1:
            log.warning("%s failed on %s: %s", self.what, _shown(episode), error)
            log.info("%s", error.details if isinstance(error, CallError) else "", exc_info=error.__cause__)

    def check(self, episodes: int) -> None:
        """Raise DataError where too many of this number of episodes have failed."""
        if len(self.errors) > self.limit * episodes:
            raise DataError(
                f"{self.what} failed on {len(self.errors)} of {episodes} samples, and at most the share "
                f"{self.key} = {self.limit:g} may fail; first with {self.errors[0]}"
            )


class RolloutCollector:
    """Samples episodes from engines and judges each as it ends. With `turns`, an environment answers between the
    turns, and an episode's next turn waits for nothing but its own answer."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: ChatTokenizer,
        judge: Judge,
        max_length: int,
        shares: ErrorShares,
        turns: Turns | None = None,
    ):
        self._generation, self._tokenizer, self._judge, self._turns = generation, tokenizer, judge, turns
        self._max_length, self._shares = max_length, shares
        self._sessions = itertools.count()

    def collect(self, problems: Sequence[Problem], samples: int, sampling: Sampling, seed: int) -> Rollout:
        """`samples` episodes of each problem. The seed of a response follows from `seed` and its problem's, sample's
        and turn's number.

        Raises:
            DataError: a prompt leaves no room for the response, a reward returns what is no reward, or rewards or
                environments fail on too many samples.
            EngineError, WorkerError: see `RequestQueue.sample`.
        """
        prompts = [self._tokenizer.prompt(problem.messages) for problem in problems]
        for problem, prompt in zip(problems, prompts, strict=True):
            check_length(problem, len(prompt), sampling.max_new_tokens, self._max_length)
        episodes = [
            Episode(problem, list(prompt), len(prompt))
            for problem, prompt in zip(problems, prompts, strict=True)
            for _ in range(samples)
        ]
        return asyncio.run(self._collect(episodes, samples, sampling, seed))

    async def _collect(self, episodes: list[Episode], samples: int, sampling: Sampling, seed: int) -> Rollout:
        rewards = _Failures("the reward", "reward.max_error_share", self._shares.reward)
        environments = _Failures("the environment", "environment.max_error_share", self._shares.environment)
        alive = asyncio.create_task(_show_life())
        async with self._generation.serving() as requests:
            # All first turns begin together, so that the engines form the same batches every time.
            await requests.pause()
            played = []
            for index, episode in enumerate(episodes):
                player = _Player(episode, sampling, (seed, *divmod(index, samples)), environments, rewards)
                played.append(asyncio.create_task(self._play(player, requests)))
            await asyncio.sleep(0)
            requests.resume()
            try:
                await asyncio.gather(*played)
            finally:
                for task in (alive, *played):
                    task.cancel()
        environments.check(len(episodes))
        rewards.check(sum(episode.ending != "error" for episode in episodes))
        return Rollout(episodes, samples, len(rewards.errors), len(environments.errors))

    async def _play(self, player: "_Player", requests: Requests) -> None:
        episode = player.episode
        try:
            await self._take_turns(player, requests)
        except CallError as error:
            episode.ending, episode.reward = "error", None
            player.environments.add(error, episode)
        if episode.reward is None and episode.ending != "error":
            await self._be_judged(player)

    async def _take_turns(self, player: "_Player", requests: Requests) -> None:
        """Sample responses until the episode ends. Raises CallError: its environment fails."""
        episode, session, near = player.episode, next(self._sessions), None
        room = self._max_length - player.sampling.max_new_tokens
        try:
            while True:
                begin = time.perf_counter()
                seed = request_seed(*player.seeds, len(episode.turns))
                request = Request(tuple(episode.tokens), player.sampling, seed)
                completion, near = await requests.sample(request, near)
                episode.spans.append(Span("generate", begin, time.perf_counter(), near))
                episode.add_turn(completion, self._tokenizer.text(completion.tokens))
                if self._turns is None:
                    return
                with _timed(episode, "environment"):
                    continues = await self._turns.continues(episode, session, self._tokenizer, room)
                if not continues:
                    return
        finally:
            if self._turns is not None:
                await self._turns.environments.close(session)

    async def _be_judged(self, player: "_Player") -> None:
        """Give the episode its reward, or leave it without one where the reward fails."""
        episode = player.episode
        with _timed(episode, "reward"):
            verdict = await self._judge(episode.response, episode.problem)
        if isinstance(verdict, WrongReward):
            raise DataError(f"reward.name: {verdict}; the response was {_shown(episode)}")
        if isinstance(verdict, RewardError):
            player.rewards.add(verdict, episode)
        else:
            episode.reward = verdict


@dataclass(frozen=True)
class _Player:
    """An episode, how its responses are sampled, and where its failures are counted."""

    episode: Episode
    sampling: Sampling
    seeds: tuple[int, ...]
    environments: _Failures
    rewards: _Failures


def request_seed(*numbers: int) -> int:
    """Return a seed of 31 bits that follows from the numbers; other numbers give another seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


@contextmanager
def _timed(episode: Episode, what: Activity) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        episode.spans.append(Span(what, begin, time.perf_counter()))


async def _show_life() -> None:
    """Say again and again that the launcher's own work does not hang: what it waits for has limits of its own."""
    with suppress(asyncio.CancelledError):
        while True:
            limits.progressed()
            await asyncio.sleep(_ALIVE_S)


def _shown(episode: Episode) -> str:
    return f"{episode.response[-200:]!r} (answer {episode.problem.answer!r})"
