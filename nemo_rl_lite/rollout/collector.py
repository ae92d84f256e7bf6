"""Sample and score episodes for problems, with any engine. Each episode is a coroutine."""

import asyncio
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError, printable
from nemo_rl_lite.generation.interface import Generation, Requests, Sampling
from nemo_rl_lite.losses.advantages import differ
from nemo_rl_lite.observability.liveness import note_state, progressed
from nemo_rl_lite.rewards.judge import Judge, RewardResult
from nemo_rl_lite.rewards.registry import RewardError, WrongReward
from nemo_rl_lite.rollout.episode import Episode, Rollout
from nemo_rl_lite.rollout.play import Assistant, EpisodeRunner, SingleTurn
from nemo_rl_lite.system.user_errors import CallError

log = logging.getLogger(__name__)

# Lower bound of the expected share: at most eight times the missing prompts run at a time.
_LEAST_SHARE = 1 / 8
# Seconds between two progress checks.
_LOOK_S = 0.5
Show = Callable[[str], None]
"""Shows the progress of a rollout."""


@dataclass(frozen=True)
class ErrorShares:
    """Maximum shares of a rollout's episodes whose reward, or whose environment or agent, may fail."""

    reward: float
    environment: float


@dataclass
class _Failures:
    """Errors of one kind in a rollout. The first is logged, all are counted."""

    what: str
    key: str
    limit: float
    errors: list[Exception] = field(default_factory=list)
    _failed: set[int] = field(default_factory=set)

    def add(self, error: Exception, episode: Episode) -> None:
        """Count an episode's error."""
        self.errors.append(error)
        self._failed.add(id(episode))
        if len(self.errors) == 1:
            log.warning("%s failed on %s: %s", self.what, _shown(episode), printable(error))
            if isinstance(error, CallError | RewardError) and error.details:
                log.info("%s", error.details)

    def has(self, episode: Episode) -> bool:
        return id(episode) in self._failed

    def check(self, failed: int, episodes: int) -> None:
        """Raise DataError if too many episodes failed."""
        if failed > self.limit * episodes:
            first = f"; first with {printable(self.errors[0])}" if self.errors else ""
            raise DataError(
                f"{self.what} failed on {failed} of {episodes} samples, more than the share "
                f"{self.key} = {self.limit:g}{first}"
            )


def _shown(episode: Episode) -> str:
    return f"{episode.response[-200:]!r} (answer {episode.problem.answer!r})"


def count_errors(episodes: Sequence[Episode]) -> tuple[int, int]:
    """Count the episodes without a reward, and those whose environment or agent failed."""
    failed = sum(episode.ending == "error" for episode in episodes)
    return sum(episode.reward is None for episode in episodes) - failed, failed


@dataclass(eq=False)
class Group:
    """The samples of one prompt."""

    episodes: list[Episode]
    played: asyncio.Future
    _useful: bool | None = field(default=None, init=False)

    @property
    def is_done(self) -> bool:
        # An aborted group ends with CancelledError.
        return self.played.done() and not self.played.cancelled() and self.played.exception() is None

    @property
    def is_useful(self) -> bool:
        """True if the group is done and its rewards differ."""
        if self._useful is None and self.is_done:
            self._useful = differ([math.nan if one.reward is None else one.reward for one in self.episodes])
        return bool(self._useful)


@dataclass(eq=False)
class RolloutTask:
    """A rollout in progress: `count` prompts with `samples` episodes each.

    With `useful`, the next prompts replace those whose rewards are all equal. The first `count` useful prompts in data
    order are kept, so neither response lengths nor timing bias the choice. After `most` sampled prompts, the others
    fill the rollout.
    """

    problem: Callable[[int], Problem]
    """Returns the prompt of a number."""
    count: int
    samples: int
    sampling: Sampling
    seed: int
    """Seed of the responses, together with the numbers of prompt, sample and turn."""
    useful: bool = False
    oversample: float | None = None
    """Prompts in flight: this times `count`, minus the useful ones so far. None: an estimate of the number needed."""
    share: float = 1.0
    """Expected share of useful prompts before any is done."""
    most: int = sys.maxsize
    done: Mapping[int, list[Episode]] = field(default_factory=dict)
    """Episodes that an earlier run has scored, by the number of their prompt."""
    begun: int = 0
    """Number of prompts that an earlier run had started."""
    groups: list[Group] = field(default_factory=list, init=False)
    began: float = field(default_factory=time.perf_counter, init=False)

    def missing(self) -> int:
        """Count the prompts to start now."""
        groups = self.groups
        if not self.useful:
            return self.count - len(groups)
        if self.kept() is not None:
            return 0
        useful, ended = sum(group.is_useful for group in groups), sum(group.is_done for group in groups)
        if self.oversample is not None:
            at_a_time = math.ceil(self.count * self.oversample) - useful
        else:
            # Weight the expected share like `count` prompts of this rollout.
            share = (self.share * self.count + useful) / (self.count + ended)
            at_a_time = math.ceil((self.count - useful) / max(share, _LEAST_SHARE))
        return max(min(at_a_time - (len(groups) - ended), self.most - len(groups)), 0)

    def rollout(self) -> Rollout:
        """Join the kept groups."""
        groups, kept = self.groups, self.kept() or []
        last = max(groups.index(group) for group in kept)
        dropped = [group for group in groups if group not in kept]
        episodes = [episode for group in kept for episode in group.episodes]
        reward_errors, environment_errors = count_errors(episodes)
        return Rollout(
            episodes,
            self.samples,
            reward_errors,
            environment_errors,
            tuple(group.is_useful for group in groups[: last + 1]),
            dropped=tuple(episode for group in dropped for episode in group.episodes),
            took_s=time.perf_counter() - self.began,
        )

    def kept(self) -> list[Group] | None:
        """Return the groups to keep, in data order; None as long as unfinished groups can change them."""
        groups, kept, others = self.groups, list[Group](), list[Group]()
        for group in groups:
            if not group.is_done:
                return None
            (kept if group.is_useful or not self.useful else others).append(group)
            if len(kept) == self.count:
                return kept
        if len(groups) < self.most:
            return None
        filled = [*kept, *others[: self.count - len(kept)]]
        return [group for group in groups if group in filled]

    def progress(self, unfinished_tokens: int = 0) -> str:
        """Describe prompts done, tokens per second, and what episodes wait for. `unfinished_tokens`: tokens of
        responses in flight."""
        groups, seconds = list(self.groups), time.perf_counter() - self.began
        episodes = [episode for group in groups for episode in group.episodes]
        done = sum(group.is_done for group in groups)
        said = [f"{done} of {max(self.count, len(groups))} prompts"]
        before = sum(episode.generated for own in self.done.values() for episode in own)
        if tokens := sum(episode.generated for episode in episodes) - before + unfinished_tokens:
            said.append(f"{tokens / seconds:,.0f} tokens/s")
        waiting = [episode for episode in episodes if episode.waits_for]
        if generating := [episode.spans[-1].seconds for episode in waiting if episode.waits_for == "generate"]:
            said.append(f"{len(generating)} responses in flight, the oldest for {max(generating):.0f} s")
        counts = Counter(episode.waits_for for episode in waiting)
        said += [f"{counts[what]} wait for the {what}" for what in ("environment", "reward") if counts[what]]
        return ", ".join(said)

    @property
    def answers(self) -> int:
        """Count the answers of engines, environments, agents and rewards: a sign of life."""
        episodes = (episode for group in list(self.groups) for episode in group.episodes)
        return sum(len(episode.spans) - (episode.waits_for is not None) for episode in episodes)


class RolloutCollector:
    """Samples episodes and scores each as it ends. No episode waits for another."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: ChatTokenizer,
        judge: Judge,
        max_length: int,
        shares: ErrorShares,
        play: EpisodeRunner | None = None,
    ):
        self.generation, self._tokenizer, self._judge = generation, tokenizer, judge
        self._max_length, self._shares, self._play = max_length, shares, play or SingleTurn()

    def collect(self, task: RolloutTask, show: Show = lambda _: None) -> Rollout:
        """Sample and score a rollout; `show` gets its progress twice a second.

        Raises:
            DataError: a prompt leaves no room for the response, or a reward function returns no reward. User code
                has a fault, or fails on too many samples.
            EngineError, WorkerError: see `RequestQueue.sample`.
        """
        found: list[Rollout] = []

        async def show_life(requests: Requests) -> None:
            answers = -1
            while True:
                # Calls of engines have their own time limit.
                if requests.are_in_work or answers != task.answers:
                    progressed()
                answers = task.answers
                await asyncio.sleep(_LOOK_S)
                show(progress := task.progress(requests.unfinished_tokens))
                note_state(progress)

        # Return nothing: asyncio formats the result when it restores the SIGINT handler, which takes time.
        async def run() -> None:
            async with self.generation.serving() as requests:
                alive = asyncio.create_task(show_life(requests))
                try:
                    found.append(await self.gather(task, requests))
                finally:
                    alive.cancel()
                    await asyncio.gather(alive, return_exceptions=True)
                    note_state("")

        asyncio.run(run())
        return found[0]

    async def gather(self, task: RolloutTask, requests: Requests) -> Rollout:
        """Sample and score a rollout while the engines serve. Raises what `collect` raises."""
        rewards = _Failures("the reward", "reward.max_failure_fraction", self._shares.reward)
        section, groups = self._play.section, task.groups
        ended: asyncio.Queue[asyncio.Future] = asyncio.Queue()
        environments = _Failures(f"the {section}", f"{section}.max_failure_fraction", self._shares.environment)
        try:
            while missing := max(task.missing(), task.begun - len(groups)):
                # Deterministic batches in the engines.
                with requests.submit_as_batch():
                    for number in range(len(groups), len(groups) + missing):
                        group = self._begin(number, task, requests, environments, rewards)
                        group.played.add_done_callback(ended.put_nowait)
                        groups.append(group)
                    await asyncio.sleep(0)
                while not task.missing() and task.kept() is None:
                    (await ended.get()).result()
                    while not ended.empty():
                        ended.get_nowait().result()
        finally:
            for group in groups:
                group.played.cancel()
            await asyncio.gather(*(group.played for group in groups), return_exceptions=True)
        sampled = [episode for group in groups if group.is_done for episode in group.episodes]
        played = [episode for episode in sampled if episode.ending != "error"]
        environments.check(len(sampled) - len(played), len(sampled))
        # Timeouts with reward 0 count as failures.
        rewards.check(sum(one.reward is None or rewards.has(one) for one in played), len(played))
        return task.rollout()

    def _begin(
        self, number: int, task: RolloutTask, requests: Requests, environments: _Failures, rewards: _Failures
    ) -> Group:
        """Start the samples of prompt `number`, or take those of an earlier run."""
        problem, sampling = task.problem(number), task.sampling
        if number in task.done:
            played = asyncio.get_running_loop().create_future()
            played.set_result(None)
            return Group(task.done[number], played)
        prompt = self._tokenizer.prompt(problem.messages, problem.tools)
        check_length(problem, len(prompt), sampling.max_new_tokens, self._max_length)
        episodes = [Episode(problem, list(prompt), len(prompt)) for _ in range(task.samples)]

        async def run(sample: int, episode: Episode) -> None:
            seeds = (task.seed, number, sample)
            assistant = Assistant(episode, requests, self._tokenizer, sampling, seeds, self._max_length)
            try:
                await self._play.play(episode, assistant)
            except CallError as error:
                if error.is_fault:
                    rule = "correct the code: this error does not depend on the response"
                    raise DataError(f"{self._play.section}.name: {error}{error.place}; {rule}") from error
                episode.ending, episode.reward = "error", None
                environments.add(error, episode)
            finally:
                assistant.conversation.ended = True
            if episode.reward is None and episode.ending != "error":
                await self._judge_episode(episode, rewards)

        return Group(episodes, asyncio.gather(*(run(sample, episode) for sample, episode in enumerate(episodes))))

    async def _judge_episode(self, episode: Episode, rewards: _Failures) -> None:
        with episode.waiting("reward"):
            verdict = await self._judge(episode.response, episode.problem)
        if isinstance(verdict, WrongReward):
            raise DataError(f"{verdict.section}.name: {verdict}; the response was {_shown(episode)}")
        if failure := verdict if isinstance(verdict, RewardError) else verdict.late:
            rewards.add(failure, episode)
        if isinstance(verdict, RewardResult):
            episode.reward, episode.reward_parts = verdict.reward, verdict.parts


def check_length(problem: Problem, tokens: int, max_new_tokens: int, max_length: int) -> None:
    """Raise DataError if a prompt of `tokens` tokens leaves no room for `max_new_tokens` within `max_length`."""
    if tokens + max_new_tokens > max_length:
        start = problem.messages[-1]["content"][:60]
        raise DataError(
            f"a prompt of {tokens} tokens and generation.max_new_tokens = {max_new_tokens} exceed "
            f"policy.max_total_sequence_length = {max_length}: {start!r}. Raise the limit, lower "
            "generation.max_new_tokens, or leave such prompts out: data.too_long=drop."
        )
