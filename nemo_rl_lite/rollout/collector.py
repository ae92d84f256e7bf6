"""Collect rollouts of groups, with dynamic sampling."""

import asyncio
import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_rl_lite.config.sources import in_source
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.observability.liveness import note_state, progressed
from nemo_rl_lite.rollout.episode import EpisodeRecord, Failure, Sampled
from nemo_rl_lite.rollout.groups import Group, Players, Playground, PlayProgress, PromptTask
from nemo_rl_lite.rollout.play import Section
from nemo_rl_lite.rollout.rollout import EpisodeStore, Rollout
from nemo_rl_lite.rollout.saved import SavedGroup

log = logging.getLogger(__name__)

# Lower bound of the expected share: at most eight times the missing prompts run at a time.
_LEAST_SHARE = 1 / 8
# Seconds between two progress checks.
_LOOK_S = 0.5
Show = Callable[[str], None]
"""Shows the progress of a rollout."""
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class ErrorShares:
    """Maximum shares of episodes whose reward, or whose environment or agent, may fail, for a source."""

    reward: float
    environment: float
    section: Section = "environment"
    """Section of the configuration with the user code of the source's episodes."""


@dataclass
class _Failures:
    """Failures of one kind in the samples of a source. The first is logged."""

    what: str
    key: str
    limit: float
    first: Failure | None = None
    failed: int = 0
    samples: int = 0

    def note(self, failures: Sequence[Failure]) -> None:
        """Log the first failure."""
        if self.first is None and failures:
            self.first = failures[0]
            log.warning("%s failed on %s: %s", self.what, self.first.shown, self.first.text)
            if self.first.details:
                log.info("%s", self.first.details)


class _SourceFailures:
    """Failures of the samples of one source in a rollout."""

    def __init__(self, source: str, shares: ErrorShares):
        of, section = f" of {source}" if source else "", shares.section
        self._source = source
        key = in_source(source, "reward.max_failure_fraction")
        self.rewards = _Failures(f"the reward{of}", key, shares.reward)
        key = in_source(source, f"{section}.max_failure_fraction")
        self.plays = _Failures(f"the {section}{of}", key, shares.environment)

    def note(self, group: Group) -> None:
        """Log the first failures."""
        self.plays.note([one for one in group.failures if one.kind == "play"])
        self.rewards.note([one for one in group.failures if one.kind == "reward"])

    def count(self, groups: Sequence[Group]) -> None:
        """Count the failed samples of these groups."""
        groups = [group for group in groups if group.task.problem.source == self._source]
        episodes = [episode for group in groups for episode in group.episodes]
        played = [episode for episode in episodes if episode.ending != "error"]
        self.plays.failed, self.plays.samples = len(episodes) - len(played), len(episodes)
        self.rewards.failed = sum(one.reward is None or one.is_late for one in played)
        self.rewards.samples = len(played)


def _check_all(failures: Collection[_SourceFailures], groups: Sequence[Group], least: int = 0) -> None:
    """Raise DataError if too many samples of these groups failed, of at least `least` samples."""
    for one in failures:
        one.count(groups)
    _check([one.plays for one in failures], least)
    _check([one.rewards for one in failures], least)


def _check(failures: Sequence[_Failures], least: int) -> None:
    """See `_check_all`. Sources with the same limit are counted together, because a source may have a single prompt in
    a rollout."""
    for limit in dict.fromkeys(one.limit for one in failures):
        same = [one for one in failures if one.limit == limit]
        failed, samples = sum(one.failed for one in same), sum(one.samples for one in same)
        if failed > limit * max(samples, least):
            worst = max(same, key=lambda one: one.failed)
            first = f"; first with {worst.first.text}" if worst.first else ""
            own = f"{worst.failed} of {worst.samples} samples"
            together = f" ({failed} of {samples} in all sources with this limit)" if len(same) > 1 else ""
            rule = f"{own}{together}, more than the share {worst.key} = {limit:g}"
            raise DataError(f"{worst.what} failed on {rule}{first}")


def count_errors(episodes: Sequence[Sampled]) -> tuple[int, int]:
    """Count the episodes without a reward, and those whose environment or agent failed."""
    failed = sum(episode.ending == "error" for episode in episodes)
    return sum(episode.reward is None for episode in episodes) - failed, failed


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
    saved: Mapping[int, SavedGroup] = field(default_factory=dict)
    """Episodes that an earlier run has scored or begun, by the number of their prompt."""
    begun: int = 0
    """Number of prompts that an earlier run had started."""
    spent_s: float = 0.0
    """Seconds that an earlier run has taken."""
    paused_s: float = field(default=0.0, init=False)
    """Seconds in which the engines were paused."""
    step: int = 0
    """Step that trains on the rollout; 0 for a validation, which has priority."""
    turn_discount: float | None = None
    """See `Rollout`."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Maximum tokens per response, by source, if they differ from `sampling`."""
    groups: list[Group] = field(default_factory=list, init=False)
    players: Players | None = field(default=None, init=False)
    number: int = field(default_factory=_NUMBERS.__next__, init=False)
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
            took_s=self.took_s,
            store=None if self.players is None else self.players.store,
            turn_discount=self.turn_discount,
        )

    def forget(self, begun: int) -> None:
        """Forget the groups from this number on, whose prompts were given back when the rollout was complete."""
        given_back, self.groups = self.groups[begun:], self.groups[:begun]
        self.begun = 0
        if self.players is not None and (store := self.players.store) is not None:
            store.release([one for group in given_back for one in group.episodes if isinstance(one, EpisodeRecord)])

    @property
    def took_s(self) -> float:
        """Seconds since the first request, without pauses of the engines."""
        return time.perf_counter() - self.began - self.paused_s + self.spent_s

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
        done, now = sum(group.is_done for group in groups), self.live()
        said = [f"{done} of {max(self.count, len(groups))} prompts"]
        before = sum(group.task.saved.generated for group in groups if group.task.saved is not None)
        if tokens := now.generated - before + unfinished_tokens:
            said.append(f"{tokens / seconds:,.0f} tokens/s")
        if generating := now.waiting.get("generate"):
            said.append(f"{generating} responses in flight, the oldest for {now.oldest_s:.0f} s")
        said += [
            f"{count} wait for the {what}" for what in ("environment", "reward") if (count := now.waiting.get(what))
        ]
        return ", ".join(said)

    def live(self) -> PlayProgress:
        """Return the progress of all groups."""
        return PlayProgress() if self.players is None else self.players.progress(list(self.groups))

    @property
    def answers(self) -> int:
        """Count the answers of engines, environments, agents and rewards: a sign of life."""
        return self.live().answers

    def prompt(self, number: int) -> PromptTask:
        """Return the task of a prompt."""
        problem, saved = self.problem(number), self.saved.get(number)
        most = self.limits.get(problem.source, self.sampling.max_new_tokens)
        sampling = replace(self.sampling, max_new_tokens=most)
        options = self.samples, sampling, self.seed, self.step, saved, self.turn_discount
        return PromptTask(self.number, number, problem, *options)


class RolloutCollector:
    """Samples and scores rollouts."""

    def __init__(self, playground: Playground, shares: Mapping[str, ErrorShares]):
        """`shares`: of each source, by name."""
        self.playground, self._shares = playground, shares

    def collect(self, task: RolloutTask, show: Show = lambda _: None) -> Rollout:
        """Sample and score a rollout; `show` gets its progress twice a second.

        Raises:
            DataError: a prompt leaves no room for the response, or a reward function returns no reward. User code
                has a fault, or fails on too many samples.
            EngineError, WorkerError: see `RequestQueue.sample`.
        """
        found: list[Rollout] = []

        async def show_life(players: Players) -> None:
            answers = -1
            while True:
                # Calls of engines have their own time limit.
                if players.are_in_work or answers != task.answers:
                    progressed()
                answers = task.answers
                await asyncio.sleep(_LOOK_S)
                show(progress := task.progress(players.unfinished_tokens))
                note_state(progress)

        # Return nothing: asyncio formats the result when it restores the SIGINT handler, which takes time.
        async def run() -> None:
            async with self.playground.serving() as players:
                alive = asyncio.create_task(show_life(players))
                try:
                    rollout = await self.gather(task, players)
                    while rollout.is_lost:
                        rollout = await self.gather(task, players)
                    found.append(rollout)
                finally:
                    alive.cancel()
                    await asyncio.wait([alive])
                    note_state("")
                if not alive.cancelled():
                    alive.result()

        asyncio.run(run())
        return found[0]

    async def gather(self, task: RolloutTask, players: Players) -> Rollout:
        """Sample and score a rollout with these players. A task that has been gathered before gets what it has lost
        since. Raises what `collect` raises."""
        groups, task.players = task.groups, players
        failures = {source: _SourceFailures(source, shares) for source, shares in self._shares.items()}
        ended: asyncio.Queue[Group] = asyncio.Queue()
        begun = max((place + 1 for place, group in enumerate(groups) if not group.played.cancelled()), default=0)
        await players.discard(groups[begun:])
        del groups[begun:]
        for group in groups:
            group.on_end = ended.put_nowait
            if group.played.cancelled() or _is_lost(group, players.store):
                players.play_again(group)
            elif group.played.done():
                group.played.result()
        try:
            while task.kept() is None:
                if missing := max(task.missing(), task.begun - len(groups)):
                    # Deterministic batches in the engines.
                    with players.submit_as_batch():
                        for number in range(len(groups), len(groups) + missing):
                            group = players.play(task.prompt(number))
                            group.on_end = ended.put_nowait
                            groups.append(group)
                        await asyncio.sleep(0)
                while not task.missing() and task.kept() is None:
                    for group in [await ended.get(), *_waiting(ended)]:
                        if not group.played.done():
                            # It has ended and is played again, because its worker has died.
                            continue
                        group.played.result()
                        failures[group.task.problem.source].note(group)
                        if group.failures and not task.useful:
                            # A call may have failed at its time limit, so do not wait for the others.
                            done = [one for one in groups if one.is_done]
                            _check_all(failures.values(), done, task.count * task.samples)
        finally:
            for group in groups:
                group.on_end = None
            kept = task.kept() or []
            await players.stop([group for group in groups if group not in kept])
        if task.kept() is None:
            # A rollout worker died at the end.
            return await self.gather(task, players)
        _check_all(failures.values(), [group for group in groups if group.is_done])
        return task.rollout()


def _waiting(ended: asyncio.Queue[Group]) -> Iterator[Group]:
    while not ended.empty():
        yield ended.get_nowait()


def _is_lost(group: Group, store: EpisodeStore | None) -> bool:
    """Return whether a finished group's episodes have died with their worker."""
    records = [one for one in group.episodes if isinstance(one, EpisodeRecord)] if group.is_done else []
    return store is not None and not all(map(store.has, records))
