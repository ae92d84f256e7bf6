"""Plays episodes of a run's configuration with the scripted policy, and notes what the user's code leaves behind."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import psutil

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.rehearsal.script import (
    AFTER_KILL,
    KILLED,
    OTHERS,
    PLAIN,
    SAME,
    SLOW,
    TWICE,
    UNANSWERED,
    Script,
    ScriptedGeneration,
    ScriptedRequests,
)
from nemo_rl_lite.rollout.episode import Episode, Failure
from nemo_rl_lite.rollout.groups import Group, LocalPlayers, PromptTask
from nemo_rl_lite.rollout.segments import Segment
from nemo_rl_lite.run.jobs import GRPOJob
from nemo_rl_lite.system.pool import running_calls

AT_ONCE = 5
"""Number of concurrent episodes with slow responses."""
# Wrong answers of different episodes begin far from one another.
_MARKS, _BETWEEN = 3_000_017, 1_009
# Seconds for a second episode to ask, for processes of user code to end, and between looks.
_SECOND_S, _END_S, _LOOK_S = 1.5, 0.3, 0.01


@dataclass
class Played:
    """An episode, and how it went."""

    script: Script
    episode: Episode
    seconds: float
    wrong: Sequence[str]
    """The texts of its wrong answers."""
    failure: Failure | None = None

    @property
    def segments(self) -> list[Segment]:
        return self.episode.row_segments

    @property
    def turns(self) -> int:
        return sum(len(segment.turns) for segment in self.segments)

    @property
    def trained(self) -> int:
        """Number of tokens with a loss."""
        return self.episode.generated if self.failure is None else 0

    def histories(self) -> list[list[Message]]:
        """Return the messages of each row."""
        first = self.episode
        return [[*(first.prompt if one is first else one.prompt), *one.said] for one in self.segments]


@dataclass
class Rehearsal:
    """All episodes, in the order of the scripts."""

    config: Config
    episodes: list[Played] = field(default_factory=list)
    left_processes: list[str] = field(default_factory=list)
    """Command lines of processes that the user's code left."""
    left_files: list[str] = field(default_factory=list)
    """Names of files and folders that it left among temporary files."""
    late_s: float | None = None
    """Seconds after which the agent still ran although its episode had ended without a response; None if it ended."""
    left_unanswered: list[str] = field(default_factory=list)
    """Processes and files that the episode without a response left."""

    def of(self, *scripts: Script) -> list[Played]:
        return [one for one in self.episodes if one.script in scripts]


def for_rehearsal(config: Config, limit_s: float) -> Config:
    """Return the configuration without rollout workers, and with one process of user code. A call of agent or
    environment may take at most `limit_s` seconds."""
    options = config.options(GRPOConfig)
    limits = {
        name: replace(own, processes=1, timeout_s=min(own.timeout_s or limit_s, limit_s))
        for name, own in (("agent", config.agent), ("environment", config.environment))
    }
    own = replace(options, rollouts=replace(options.rollouts, num_workers=0))
    return replace(config, algorithm=own, **limits)


def rehearse(job: GRPOJob, config: Config, temporary: Path) -> Rehearsal:
    """Play all scripts. `temporary`: folder of the temporary files of user code; see `temporary_folder`.

    Raises:
        ConfigError: the endpoint's address cannot be used.
        DataError: the user's code fails for any response.
    """
    found = Rehearsal(config)
    with job.players(ScriptedGeneration()) as players:
        asyncio.run(_Stage(job, players, found, temporary).serve())
    return found


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give processes of user code a separate folder for temporary files; they must start in the block."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="rehearsal-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)


@dataclass
class _Playing:
    """An episode in play."""

    script: Script
    requests: ScriptedRequests
    group: Group
    begun: float
    """Time of `time.perf_counter()`."""

    @property
    def is_over(self) -> bool:
        return self.group.played.done()

    @property
    def waits(self) -> bool:
        """True if it waits for a held response."""
        return self.requests.are_reached and not self.is_over

    async def end(self) -> Played:
        """Wait for the end. Raises DataError: the user's code fails for any response."""
        try:
            await self.group.played
        except DataError as error:
            raise DataError(f"{error} (script: {self.script.name})") from error
        return self.so_far()

    def so_far(self) -> Played:
        episode = self.requests.episode
        return Played(self.script, episode, time.perf_counter() - self.begun, self.requests.texts, episode.failure)


class _Stage:
    def __init__(self, job: GRPOJob, players: LocalPlayers, found: Rehearsal, temporary: Path):
        self._job, self._players, self._found, self._temporary = job, players, found, temporary
        self._sampling = Sampling.of(found.config.generation, job.tokenizer.end_tokens)
        self._numbers = iter(range(1_000_000))

    async def serve(self) -> None:
        """Play while the endpoint answers."""
        async with self._players.serving():
            await self._play()

    async def _play(self) -> None:
        """Play all scripts. Only the first ones if they all fail."""
        found = self._found
        found.episodes += await asyncio.gather(*(self._episode(script) for script in PLAIN))
        fails = all(one.failure for one in found.episodes)
        if not fails:
            await self._answer_all()
        found.left_processes, found.left_files = await self._left()
        if fails:
            return
        if found.config.agent.name is not None:
            await self._leave_unanswered()
        if _workers():
            await self._kill()

    async def _answer_all(self) -> None:
        """Play the scripts in which each request has a response."""
        found = self._found
        offers = any(segment.tools for one in found.episodes for segment in one.segments)
        offers |= any(one.episode.problem.tools for one in found.episodes)
        others = [script for script in OTHERS if offers or not script.needs_tools]
        # The second of two problems makes state of an earlier episode visible.
        more = [script for script in PLAIN for _ in range(2)]
        found.episodes += await asyncio.gather(*(self._episode(script) for script in (*more, *others)))
        found.episodes += [await self._episode(TWICE, mark=_MARKS // 3, problem=0) for _ in range(2)]
        found.episodes.append(await self._episode(SAME, problem=0))
        slow = [self._begin(SLOW) for _ in range(AT_ONCE)]
        limit_s = found.config.agent.timeout_s
        await _until(lambda: any(one.waits for one in slow) or all(one.is_over for one in slow), limit_s)
        # Two that wait at once show that episodes do not wait for one another.
        await _until(lambda: sum(not one.is_over for one in slow) < 2 or sum(one.waits for one in slow) > 1, _SECOND_S)
        for one in slow:
            one.requests.release()
        found.episodes += await asyncio.gather(*(one.end() for one in slow))

    async def _leave_unanswered(self) -> None:
        """End an episode while it waits for a response, as its time limit does. The agent's request then fails."""
        found, one = self._found, self._begin(UNANSWERED)
        # Its process ends after the whole limit.
        limit_s = (found.config.agent.timeout_s or 0.0) / 2
        await _until(lambda: one.waits or one.is_over, limit_s)
        if one.is_over:
            found.episodes.append(await one.end())
            return
        await self._players.stop([one.group])
        one.requests.episode.ending = "error"
        found.episodes.append(one.so_far())
        if not await _until(lambda: not running_calls(), limit_s):
            found.late_s = limit_s
            return
        before = {*found.left_processes, *found.left_files}
        found.left_unanswered = [name for left in await self._left() for name in left if name not in before]

    async def _kill(self) -> None:
        """Kill the processes of user code during an episode, as the kernel does when memory is short, and play another
        episode."""
        one = self._begin(KILLED)
        await _until(lambda: one.waits or one.is_over, self._found.config.agent.timeout_s)
        for worker in _workers():
            worker.kill()
        # An environment's episode still waits for the response.
        await _until(lambda: one.is_over, _END_S)
        one.requests.release()
        self._found.episodes += [await one.end(), await self._episode(AFTER_KILL)]

    async def _episode(self, script: Script, mark: int | None = None, problem: int | None = None) -> Played:
        return await self._begin(script, mark, problem).end()

    def _begin(self, script: Script, mark: int | None = None, problem: int | None = None) -> _Playing:
        number, begun = next(self._numbers), time.perf_counter()
        requests = ScriptedRequests(script, self._job.tokenizer, mark or _MARKS + number * _BETWEEN)
        one = self._job.problem(number if problem is None else problem)
        group = self._players.play_with(PromptTask(0, number, one, 1, self._sampling, 0, 1), requests)
        # Players of this process keep whole episodes.
        requests.episode = cast(Episode, group.episodes[0])
        return _Playing(script, requests, group, begun)

    async def _left(self) -> tuple[list[str], list[str]]:
        """Return the command lines of processes, and the names of temporary files, that user code has left."""
        await _until(lambda: not _left_processes(), _END_S)
        files = (path.name for path in self._temporary.iterdir() if not path.name.startswith("pymp-"))
        return _left_processes(), sorted(files)


async def _until(holds: Callable[[], bool], limit_s: float | None) -> bool:
    """Wait until a condition holds; return whether it does."""
    late = time.monotonic() + (limit_s or 0.0)
    while not (held := holds()) and time.monotonic() < late:
        await asyncio.sleep(_LOOK_S)
    return held


def _workers() -> list[psutil.Process]:
    """Return the processes of user code. Each is the child of its guard; see `pool_process`."""
    found = []
    for guard in psutil.Process().children():
        with suppress(psutil.Error):
            found += guard.children() if "nemo_rl_lite.system.pool_process" in guard.cmdline() else []
    return found


def _left_processes() -> list[str]:
    """Return the command lines of the descendants of processes of user code."""
    found = []
    for worker in _workers():
        with suppress(psutil.Error):
            found += [" ".join(child.cmdline())[:80] for child in worker.children(recursive=True)]
    return [one for one in found if one and "pool_process" not in one and "multiprocessing" not in one]
