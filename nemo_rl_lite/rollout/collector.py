"""Problems -> sampled and judged episodes, whatever the engine. Each episode is a coroutine."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Generation, Requests, Sampling
from nemo_rl_lite.host.pool import CallError
from nemo_rl_lite.observability.liveness import progressed
from nemo_rl_lite.rewards.judge import Judge, Judged
from nemo_rl_lite.rewards.value import RewardError, WrongReward
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.failures import ErrorShares, Failures, shown
from nemo_rl_lite.rollout.groups import Group, Wanted
from nemo_rl_lite.rollout.playing import Assistant, Play, SingleTurn
from nemo_rl_lite.rollout.progress import progress
from nemo_rl_lite.rollout.prompts import check_length
from nemo_rl_lite.rollout.rollout import Rollout

# Seconds between two signs of life of the launcher, while it waits for engines, environments, agents and rewards.
_ALIVE_S = 0.5

Show = Callable[[str], None]
"""Shows people how far a rollout is."""


@dataclass(eq=False)
class Gathering:
    """A rollout while it is sampled."""

    wanted: Wanted
    sampling: Sampling
    seed: int
    """The seed of a response follows from it and the numbers of its prompt, its sample and its turn."""
    done: Mapping[int, list[Episode]] = field(default_factory=dict)
    """The episodes of prompts, by number, that an earlier run has sampled and judged."""
    begun: int = 0
    """The prompts that an earlier run had begun."""
    groups: list[Group] = field(default_factory=list, init=False)
    began: float = field(default_factory=time.perf_counter, init=False)

    def progress(self) -> str:
        """Say how far it is."""
        return progress(self.groups, self.wanted.count, time.perf_counter() - self.began)

    @property
    def waits_for_others(self) -> bool:
        """Whether an episode waits for an environment, an agent or a reward."""
        episodes = (episode for group in list(self.groups) for episode in group.episodes)
        return any(episode.waits_for in ("environment", "reward") for episode in episodes)


class RolloutCollector:
    """Samples episodes from engines and judges each as it ends. `play` says how an episode is played; no episode waits
    for another."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: ChatTokenizer,
        judge: Judge,
        max_length: int,
        shares: ErrorShares,
        play: Play | None = None,
    ):
        self._generation, self._tokenizer, self._judge = generation, tokenizer, judge
        self._max_length, self._shares, self._play = max_length, shares, play or SingleTurn()

    def serving(self) -> AbstractAsyncContextManager[Requests]:
        """See `Generation.serving`."""
        return self._generation.serving()

    def collect(self, gathering: Gathering, show: Show = lambda _: None) -> Rollout:
        """Sample and judge the wanted episodes; `show` is told twice a second how far they are.

        Raises:
            DataError: a prompt leaves no room for the response, a reward returns what is no reward, or rewards,
                environments or agents fail on too many samples.
            EngineError, WorkerError: see `RequestQueue.sample`.
        """
        found: list[Rollout] = []
        # The task itself returns nothing: asyncio writes its result out as text where it gives SIGINT back, which takes
        # a part of a second for a rollout.
        asyncio.run(self._collect(gathering, show, found))
        return found[0]

    async def _collect(self, gathering: Gathering, show: Show, found: list[Rollout]) -> None:
        alive = asyncio.create_task(_show_life(gathering, show))
        try:
            async with self.serving() as requests:
                found.append(await self.gather(gathering, requests))
        finally:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)

    async def gather(self, gathering: Gathering, requests: Requests) -> Rollout:
        """Sample and judge the wanted episodes, while the engines serve. Raises what `collect` raises."""
        rewards = Failures("the reward", "reward.max_error_share", self._shares.reward)
        section, wanted, groups = self._play.section, gathering.wanted, gathering.groups
        ended: asyncio.Queue[asyncio.Future] = asyncio.Queue()
        environments = Failures(f"the {section}", f"{section}.max_error_share", self._shares.environment)
        try:
            while missing := max(wanted.missing(groups), gathering.begun - len(groups)):
                # The engines form the same batches every time.
                with requests.together():
                    for number in range(len(groups), len(groups) + missing):
                        group = self._begin(number, gathering, requests, environments, rewards)
                        group.played.add_done_callback(ended.put_nowait)
                        groups.append(group)
                    await asyncio.sleep(0)
                while not wanted.missing(groups) and not wanted.is_settled(groups):
                    (await ended.get()).result()
                    while not ended.empty():
                        ended.get_nowait().result()
        finally:
            for group in groups:
                group.played.cancel()
            await asyncio.gather(*(group.played for group in groups), return_exceptions=True)
        sampled = [episode for group in groups if group.is_done for episode in group.episodes]
        played = [episode for episode in sampled if episode.ending != "error"]
        reward_errors, environment_errors = sum(one.reward is None for one in played), len(sampled) - len(played)
        environments.check(environment_errors, len(sampled))
        # Those that are wrong because they were late have a reward, and show all the same that judging is too slow.
        rewards.check(sum(one.reward is None or rewards.has(one) for one in played), len(played))
        rollout = wanted.rollout(groups, reward_errors, environment_errors)
        rollout.took_s = time.perf_counter() - gathering.began
        return rollout

    def _begin(
        self,
        number: int,
        gathering: Gathering,
        requests: Requests,
        environments: Failures,
        rewards: Failures,
    ) -> Group:
        """Begin the samples of the prompt of this number, or take those of an earlier run."""
        problem = gathering.wanted.problem(number)
        if number in gathering.done:
            played = asyncio.get_running_loop().create_future()
            played.set_result(None)
            return Group(gathering.done[number], played)
        episodes = self._episodes(problem, gathering.wanted.samples, gathering.sampling)
        players = [
            _Player(episode, gathering.sampling, (gathering.seed, number, sample), environments, rewards)
            for sample, episode in enumerate(episodes)
        ]
        return Group(episodes, asyncio.gather(*(self._bring_to_its_end(player, requests) for player in players)))

    def _episodes(self, problem: Problem, samples: int, sampling: Sampling) -> list[Episode]:
        prompt = self._tokenizer.prompt(problem.messages, problem.tools)
        check_length(problem, len(prompt), sampling.max_new_tokens, self._max_length)
        return [Episode(problem, list(prompt), len(prompt)) for _ in range(samples)]

    async def _bring_to_its_end(self, player: "_Player", requests: Requests) -> None:
        episode = player.episode
        assistant = Assistant(
            episode, requests, self._tokenizer, player.sampling, player.seeds, max_length=self._max_length
        )
        try:
            await self._play.play(episode, assistant)
        except CallError as error:
            episode.ending, episode.reward = "error", None
            player.environments.add(error, episode)
        if episode.reward is None and episode.ending != "error":
            await self._be_judged(player)

    async def _be_judged(self, player: "_Player") -> None:
        """Give the episode its reward, or leave it without one where the reward fails."""
        episode = player.episode
        with episode.waiting("reward"):
            verdict = await self._judge(episode.response, episode.problem)
        if isinstance(verdict, WrongReward):
            raise DataError(f"{verdict.section}.name: {verdict}; the response was {shown(episode)}")
        if failure := verdict if isinstance(verdict, RewardError) else verdict.late:
            player.rewards.add(failure, episode)
        if isinstance(verdict, Judged):
            episode.reward, episode.reward_parts = verdict.reward, verdict.parts


@dataclass(frozen=True)
class _Player:
    """An episode, how its responses are sampled, and where its failures are counted."""

    episode: Episode
    sampling: Sampling
    seeds: tuple[int, ...]
    environments: Failures
    rewards: Failures


async def _show_life(gathering: Gathering, show: Show) -> None:
    """Say again and again how far the rollout is, and that the launcher's own work does not hang: what it waits for has
    limits of its own."""
    with suppress(asyncio.CancelledError):
        while True:
            progressed()
            await asyncio.sleep(_ALIVE_S)
            show(gathering.progress())
