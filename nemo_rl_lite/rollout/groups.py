"""Groups: the episodes of one prompt, and who plays them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from nemo_rl_lite.config.sources import in_source, naming_source
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError, printable
from nemo_rl_lite.generation.interface import Generation, Requests, Sampling
from nemo_rl_lite.losses.advantages import differ
from nemo_rl_lite.rewards.judge import Judge, RewardResult
from nemo_rl_lite.rewards.registry import RewardError, WrongReward
from nemo_rl_lite.rollout.episode import Activity, Episode, EpisodeRecord, Failure, Sampled, returns_of
from nemo_rl_lite.rollout.play import Assistant, EpisodeRunner
from nemo_rl_lite.rollout.rollout import EpisodeStore
from nemo_rl_lite.rollout.saved import SavedGroup, Writing, save_groups
from nemo_rl_lite.system.user_errors import CallError


@dataclass(frozen=True)
class PromptTask:
    """One prompt of a rollout, to play `samples` times."""

    rollout: int
    """Number of the rollout's task in this process."""
    number: int
    """Number of the prompt in the rollout."""
    problem: Problem
    samples: int
    sampling: Sampling
    seed: int
    """Seed of the responses, together with the numbers of prompt, sample and turn."""
    step: int
    """Step that trains on the rollout. Earlier steps have priority."""
    saved: SavedGroup | None = None
    """Episodes that an earlier run has scored or begun."""
    turn_discount: float | None = None
    """See `Rollout`."""


@dataclass(frozen=True)
class PlayProgress:
    """Progress of episodes."""

    generated: int = 0
    """Sampled tokens of complete turns."""
    answers: int = 0
    """Answers of engines, environments, agents and rewards: a sign of life."""
    waiting: Mapping[Activity, int] = field(default_factory=dict)
    """Number of waiting episodes by what they wait for."""
    oldest_s: float = 0.0
    """Longest wait for a response."""

    @classmethod
    def of(cls, episodes: Sequence[Sampled]) -> "PlayProgress":
        generated, answers, oldest, waiting = 0, 0, 0.0, Counter[Activity]()
        for episode in episodes:
            generated += episode.generated
            if isinstance(episode, EpisodeRecord):
                answers += 1
                continue
            what, unanswered = episode.waits_for, [span for span in episode.spans if span.end is None]
            answers += len(episode.spans) - len(unanswered)
            if what is not None:
                waiting[what] += 1
            # An agent may ask for several responses at a time.
            oldest = max(oldest, *(span.seconds for span in unanswered if span.what == "generate"), 0.0)
        return cls(generated, answers, waiting, oldest)

    def __add__(self, other: "PlayProgress") -> "PlayProgress":
        waiting, oldest = Counter(self.waiting) + Counter(other.waiting), max(self.oldest_s, other.oldest_s)
        return PlayProgress(self.generated + other.generated, self.answers + other.answers, waiting, oldest)


@dataclass(eq=False)
class Group:
    """A prompt in play. `episodes` grow meanwhile if they are here, otherwise they are there when the group is done."""

    task: PromptTask
    played: asyncio.Future[Any]
    """Ends when all episodes are scored, or with the error of one."""
    episodes: Sequence[Sampled] = ()
    on_end: Callable[["Group"], None] | None = None
    """Called at the end of `played`."""
    resumes: bool = False
    """True if a resumed run continues episodes in play."""
    _useful: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.played.add_done_callback(self._ended)

    def begun(self) -> list[Episode]:
        """Return copies of the episodes of an unfinished group; none if a resumed run would begin all of them again."""
        copies = [one.copied(self.resumes) for one in self.episodes if isinstance(one, Episode)]
        return copies if any(one.turns or one.history.begun for one in copies) else []

    @property
    def failures(self) -> list[Failure]:
        return [one.failure for one in self.episodes if one.failure is not None]

    @property
    def is_done(self) -> bool:
        # An aborted group ends with CancelledError.
        return self.played.done() and not self.played.cancelled() and self.played.exception() is None

    @property
    def is_useful(self) -> bool:
        """True if the group is done and its rewards, or the returns of a turn, differ."""
        if self._useful is None and self.is_done:
            self._useful = differ(returns_of(self.episodes, self.task.turn_discount, shaped=False))
        return bool(self._useful)

    def end(self, episodes: Sequence[Sampled]) -> None:
        """End a group that was played elsewhere."""
        self.episodes = episodes
        if not self.played.done():
            self.played.set_result(None)

    def restart(self) -> None:
        """Wait for the group again, because it was stopped or its episodes are lost."""
        self.episodes, self._useful = (), None
        self.played = asyncio.get_running_loop().create_future()
        self.played.add_done_callback(self._ended)

    def _ended(self, played: asyncio.Future[Any]) -> None:
        if not played.cancelled():
            # Otherwise asyncio reports the error of each group after the first failure.
            played.exception()
        if self.on_end is not None:
            self.on_end(self)


class Players(Protocol):
    """Plays groups, in this process or in rollout workers."""

    store: EpisodeStore | None
    """Store of the records' episodes."""

    @property
    def are_in_work(self) -> bool:
        """See `Requests.are_in_work`."""
        ...

    @property
    def unfinished_tokens(self) -> int:
        """See `Requests.unfinished_tokens`."""
        ...

    def submit_as_batch(self) -> AbstractContextManager[None]:
        """See `Requests.submit_as_batch`."""
        ...

    def play(self, task: PromptTask) -> Group:
        """Start a group."""
        ...

    def play_again(self, group: Group) -> None:
        """Play a group again that was stopped, or whose episodes are lost."""
        ...

    async def stop(self, groups: Sequence[Group]) -> None:
        """Abort the unfinished ones of these groups. Finished ones are not played again if their episodes are lost."""
        ...

    async def discard(self, groups: Sequence[Group]) -> None:
        """Stop groups that no rollout has, and forget their episodes."""
        ...

    def progress(self, groups: Sequence[Group]) -> PlayProgress:
        """Return the progress of a rollout's groups."""
        ...

    def save_begun(self, groups: Mapping[int, Group], file: Path) -> Writing:
        """Start to write the episodes of unfinished groups, by the numbers of their prompts, to files whose names begin
        with that of `file`."""
        ...


class Playground(Protocol):
    """Place where groups are played: this process or rollout workers."""

    def serving(self) -> AbstractAsyncContextManager[Players]:
        """Play groups during the block."""
        ...


@dataclass(frozen=True)
class GroupPlayer:
    """Plays and scores the episodes of a source's groups. No episode waits for another."""

    tokenizer: ChatTokenizer
    judge: Judge
    runner: EpisodeRunner
    max_length: int
    continues: bool = False
    """See `Request.continues`."""

    def begin(self, task: PromptTask, requests: Requests) -> Group:
        """Start a group in the running event loop. Raises DataError: the prompt leaves no room for the response."""
        saved = (None if task.saved is None else task.saved.read()) or []
        if task.saved is not None and saved and not task.saved.is_begun:
            played = asyncio.get_running_loop().create_future()
            played.set_result(None)
            return Group(task, played, saved)
        problem = task.problem
        prompt = self.tokenizer.prompt(problem.messages, problem.tools)
        with naming_source(problem.source):
            check_length(problem, len(prompt), task.sampling.max_new_tokens, self.max_length)
        episodes = [Episode(problem, list(prompt), len(prompt)) for _ in range(task.samples)]
        for sample, one in enumerate(saved):
            if one.stage != "play" or (self.runner.resumes and one.tokens[: one.prompt_length] == list(prompt)):
                episodes[sample] = replace(one, problem=problem, resumed=one.known_tokens)
        each = (self._run(task, sample, one, requests) for sample, one in enumerate(episodes))
        return Group(task, asyncio.gather(*each), episodes, resumes=self.runner.resumes)

    async def _run(self, task: PromptTask, sample: int, episode: Episode, requests: Requests) -> None:
        seeds = (task.seed, task.number, sample)
        options = requests, self.tokenizer, task.sampling, seeds, self.max_length, task.step, self.continues
        try:
            if episode.stage == "play":
                await self.runner.play(episode, Assistant(episode, *options))
        except CallError as error:
            if error.is_fault:
                rule = "correct the code: this error does not depend on the response"
                key = in_source(episode.problem.source, f"{self.runner.section}.name")
                raise DataError(f"{key}: {error}{error.place}; {rule}") from error
            episode.ending, episode.reward = "error", None
            episode.failure = _failure("play", error, episode)
        finally:
            episode.end()
        if episode.stage != "done":
            episode.stage, episode.state = "score", None
            if episode.reward is None and episode.ending != "error":
                await self._score(episode)
            episode.stage = "done"

    async def _score(self, episode: Episode) -> None:
        with episode.waiting("reward"):
            verdict = await self.judge(episode.response, episode.problem)
        if isinstance(verdict, WrongReward):
            key = in_source(episode.problem.source, f"{verdict.section}.name")
            raise DataError(f"{key}: {verdict}; the response was {shown(episode)}")
        if error := verdict if isinstance(verdict, RewardError) else verdict.late:
            episode.failure = _failure("reward", error, episode)
        if isinstance(verdict, RewardResult):
            episode.reward, episode.reward_parts = verdict.reward, verdict.parts


class LocalPlayers:
    """`Playground` and `Players` of this process."""

    store: EpisodeStore | None = None

    def __init__(self, generation: Generation, players: Mapping[str, GroupPlayer]):
        """`players`: of each source, by name."""
        self._generation, self._players = generation, players
        self._requests: Requests

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["LocalPlayers"]:
        async with self._generation.serving() as self._requests:
            yield self

    @property
    def are_in_work(self) -> bool:
        return self._requests.are_in_work

    @property
    def unfinished_tokens(self) -> int:
        return self._requests.unfinished_tokens

    def submit_as_batch(self) -> AbstractContextManager[None]:
        return self._requests.submit_as_batch()

    def play(self, task: PromptTask) -> Group:
        return self.play_with(task, self._requests)

    def play_with(self, task: PromptTask, requests: Requests) -> Group:
        """Start a group whose requests do not go to the engines."""
        return self._players[task.problem.source].begin(task, requests)

    def play_again(self, group: Group) -> None:
        raise RuntimeError("groups of this process are not lost")

    async def stop(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.played.cancel()
        await asyncio.gather(*(group.played for group in groups), return_exceptions=True)

    async def discard(self, groups: Sequence[Group]) -> None:
        await self.stop(groups)

    def progress(self, groups: Sequence[Group]) -> PlayProgress:
        return PlayProgress.of([episode for group in groups for episode in group.episodes])

    def save_begun(self, groups: Mapping[int, Group], file: Path) -> Writing:
        begun, part = begun_episodes(groups), file.with_name(f"{file.name}.parquet")

        def write() -> list[Path]:
            save_groups(part, begun)
            return [part]

        return write if begun else list


def begun_episodes(groups: Mapping[int, Group]) -> dict[int, list[Episode]]:
    """Return copies of the episodes of unfinished groups that a resumed run continues."""
    return {number: begun for number, group in groups.items() if (begun := group.begun())}


def _failure(kind: Literal["reward", "play"], error: Exception, episode: Episode) -> Failure:
    details = error.details if isinstance(error, CallError | RewardError) else ""
    return Failure(kind, printable(error), details, shown(episode))


def shown(episode: Episode) -> str:
    """Return the end of a response and the problem's answer, for an error."""
    return f"{episode.response[-200:]!r} (answer {episode.problem.answer!r})"


def check_length(problem: Problem, tokens: int, max_new_tokens: int, max_length: int) -> None:
    """Raise DataError if a prompt of `tokens` tokens leaves no room for `max_new_tokens` within `max_length`."""
    if tokens + max_new_tokens > max_length:
        start = problem.messages[-1]["content"][:60]
        raise DataError(
            f"a prompt of {tokens} tokens and generation.max_new_tokens = {max_new_tokens} exceed "
            f"policy.max_total_sequence_length = {max_length}: {start!r}. Raise the limit, lower "
            "generation.max_new_tokens, or leave such prompts out: data.too_long=drop."
        )
