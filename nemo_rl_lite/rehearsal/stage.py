"""Plays episodes of a run's configuration with the scripted policy, and notes what the user's code leaves behind."""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import psutil

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.rehearsal.script import OTHERS, PLAIN, SLOW, TWICE, Script, ScriptedGeneration, ScriptedRequests
from nemo_rl_lite.rollout.episode import Episode, Failure
from nemo_rl_lite.rollout.groups import LocalPlayers, PromptTask
from nemo_rl_lite.rollout.segments import Segment
from nemo_rl_lite.run.jobs import GRPOJob

AT_ONCE = 5
"""Number of concurrent episodes with slow responses."""
# Wrong answers of different episodes begin far from one another.
_MARKS, _BETWEEN = 3_000_017, 1_009


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
        asyncio.run(_Stage(job, players, found).serve())
        found.left_processes = _left_processes()
    found.left_files = sorted(path.name for path in temporary.iterdir() if not path.name.startswith("pymp-"))
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


class _Stage:
    def __init__(self, job: GRPOJob, players: LocalPlayers, found: Rehearsal):
        self._job, self._players, self._found = job, players, found
        self._sampling = Sampling.of(found.config.generation, job.tokenizer.end_tokens)
        self._numbers = iter(range(1_000_000))

    async def serve(self) -> None:
        """Play while the endpoint answers."""
        async with self._players.serving():
            await self.play()

    async def play(self) -> None:
        """Play each script, and those with slow responses at once. Only the first ones if they all fail."""
        found = self._found
        found.episodes += await asyncio.gather(*(self._episode(script) for script in PLAIN))
        if all(one.failure for one in found.episodes):
            return
        offers = any(segment.tools for one in found.episodes for segment in one.segments)
        offers |= any(one.episode.problem.tools for one in found.episodes)
        others = [script for script in OTHERS if offers or not script.needs_tools]
        # The second of two problems makes state of an earlier episode visible.
        more = [script for script in PLAIN for _ in range(2)]
        found.episodes += await asyncio.gather(*(self._episode(script) for script in (*more, *others)))
        found.episodes += [await self._episode(TWICE, mark=_MARKS // 3, problem=0) for _ in range(2)]
        found.episodes += await asyncio.gather(*(self._episode(SLOW) for _ in range(AT_ONCE)))

    async def _episode(self, script: Script, mark: int | None = None, problem: int | None = None) -> Played:
        number, begun = next(self._numbers), time.perf_counter()
        requests = ScriptedRequests(script, self._job.tokenizer, mark or _MARKS + number * _BETWEEN)
        one = self._job.problem(number if problem is None else problem)
        group = self._players.play_with(PromptTask(0, number, one, 1, self._sampling, 0, 1), requests)
        # Players of this process keep whole episodes.
        episode = cast(Episode, group.episodes[0])
        requests.episode = episode
        try:
            await group.played
        except DataError as error:
            raise DataError(f"{error} (script: {script.name})") from error
        return Played(script, episode, time.perf_counter() - begun, requests.texts, episode.failure)


def _left_processes() -> list[str]:
    """Return the command lines of the children of pools' processes, which have had time to end."""
    time.sleep(0.3)
    found = []
    for pool in psutil.Process().children():
        for child in pool.children(recursive=True):
            try:
                found.append(" ".join(child.cmdline())[:80])
            except psutil.Error:
                continue
    return [one for one in found if one and "pool_process" not in one and "multiprocessing" not in one]
