"""Rollout worker: plays and keeps the episodes of some engines. `cluster/` hosts it in an actor."""

import asyncio
import itertools
import logging
import os
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import engine_capacity
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import EngineError, LauncherError, WorkerError
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.losses.batch import SharedRows, TokenRows
from nemo_rl_lite.rollout.background import BackgroundLoop
from nemo_rl_lite.rollout.episode import Advantage, Episode, EpisodeRecord
from nemo_rl_lite.rollout.groups import Group, LocalPlayers, PlayProgress, PromptTask, begun_episodes
from nemo_rl_lite.rollout.playing import Playing
from nemo_rl_lite.rollout.rollout import SampleFile
from nemo_rl_lite.rollout.saved import save_groups
from nemo_rl_lite.rollout.store import write_samples
from nemo_rl_lite.workers.generation import RemoteReplica

log = logging.getLogger(__name__)

# Seconds that a report waits for news, the least time between two while groups are unfinished, and between two sums of
# progress.
_REPORT_S, _PERIOD_S, _PROGRESS_S = 0.2, 0.1, 0.5


Kept = tuple[int, Advantage | None, bool, float, int]
"""Number of an episode that the worker keeps. The launcher's decisions: advantage, whether the episode is left out, and
length penalty. Number of the row, if a call means one of several."""


def kept(record: EpisodeRecord, advantage: Advantage | None = None, row: int = 0) -> Kept:
    """Return a plain tuple, which pickles several times faster than an object."""
    return record.number, advantage, record.is_left_out, record.length_penalty, row


@dataclass(frozen=True)
class WorkerReport:
    """News of a rollout worker."""

    finished: Mapping[int, Sequence[EpisodeRecord]] = field(default_factory=dict)
    """Episodes of groups that have ended since the last report, by the launcher's number."""
    lost: Mapping[int, WorkerError] = field(default_factory=dict)
    """Engines that have died since the last report, by rank."""
    error: LauncherError | None = None
    """Error that has ended the worker's play."""
    progress: Mapping[int, PlayProgress] = field(default_factory=dict)
    """Progress of unfinished groups, by the number of their rollout."""
    are_in_work: bool = False
    unfinished_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    taken_over: int = 0
    repeated: int = 0
    waiting: int = 0
    """See `RequestQueue.waiting`."""
    description: str = ""


class RolloutWorker:
    """Queue of some engines, with tokenizer, tool parsing, environments, agents and rewards of their episodes.

    Groups come in by `play`, and `report` collects their records. Episodes stay here until `release`.
    """

    def __init__(self, config: Config, model_path: str, folder: str, rank: int, name: str, current_folder: str):
        # Paths of user code may be relative.
        os.chdir(current_folder)
        if rank > 0:
            # The first one serves, at the configured port. Agents ask their own worker.
            serve = replace(config.generation.serve, enabled=False, port=None)
            config = replace(config, generation=replace(config.generation, serve=serve))
        self._config, self._folder, self._rank, self._name = config, Path(folder), rank, name
        self._tokenizer = ChatTokenizer(Path(model_path), config.policy.tokenizer.chat_template_kwargs)
        self._playing = Playing(config)
        self._replaced: list[int] = []
        self._groups: dict[int, Group] = {}
        self._episodes: dict[int, Episode] = {}
        self._changed = threading.Condition()
        self._finished: dict[int, list[EpisodeRecord]] = {}
        # Numbers of the episodes of ended groups that are kept.
        self._ended: dict[int, list[int]] = {}
        self._lost: dict[int, WorkerError] = {}
        self._error: LauncherError | None = None
        self._progress: dict[int, PlayProgress] = {}
        self._reported, self._summed, self._session = 0.0, 0.0, 0
        self._writing: list[Future[list[str]]] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._stack = ExitStack()

    def connect(self, engines: Mapping[int, WorkerGroup], dead: Sequence[int], first: int) -> None:
        """Take over engines by rank, whose earlier requests are aborted. `dead`: ranks that have no engine. `first`:
        number of the first episode and request; those of an earlier process are smaller."""
        self._numbers, self._ranks = itertools.count(first), list(engines)
        self._replicas = [RemoteReplica(group, rank) for rank, group in engines.items()]
        gone = [self._ranks.index(rank) for rank in dead]
        gone += asyncio.run(self._clear(gone))
        capacity, share = self._config.generation.vllm_cfg.max_num_seqs, engine_capacity(self._config)
        self._queue = RequestQueue(self._replicas, capacity, self._note_loss, lambda: None, gone, first, share)
        machine = ray.util.get_node_ip_address()
        playing = self._playing.players(self, self._tokenizer, self._folder, log.info, machine)
        self._players: LocalPlayers = self._stack.enter_context(playing)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RequestQueue]:
        """See `Generation.serving`."""
        async with self._queue.serving() as queue:
            yield queue

    def finish_generation(self) -> dict[str, float]:
        """See `Generation.finish_generation`, which is the launcher's part."""
        return {}

    def close(self) -> None:
        """End the endpoint, if there is one."""
        self._stack.close()

    def enter(self, session: int) -> None:
        """Play groups until `leave`. `session`: a unique number."""
        with self._changed:
            self._error, self._finished, self._session = None, {}, session
            self._changed.notify_all()
        self._groups.clear()
        self._adopt_replaced()
        self._loop = BackgroundLoop("rollouts", self._players.serving)
        self._loop.start()

    def leave(self) -> WorkerReport:
        """Abort what is unfinished, and return the last report."""
        self._loop.end()
        with self._changed:
            self._session = 0
            self._changed.notify_all()
            report = self._now()
            # The launcher reads the losses of this report with the next one.
            self._lost = dict(report.lost)
            return report

    def play(self, tasks: Mapping[int, PromptTask]) -> None:
        """Start groups by the launcher's numbers."""
        self._loop.post(self._begin(tasks))

    def stop(self, numbers: Sequence[int]) -> dict[int, list[EpisodeRecord]]:
        """Abort groups; return their episodes so far."""
        return self._loop.wait(self._stop(numbers), lambda: None)

    def report(self, session: int) -> WorkerReport:
        """Wait a moment for news of a session, and return them. Those of a later one are not lost to its listener."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news() or session != self._session, _REPORT_S)
            # Collect several groups.
            early = self._reported + _PERIOD_S - time.monotonic()
            self._changed.wait_for(lambda: self._is_urgent() or session != self._session, max(early, 0.0))
            if session != self._session:
                return WorkerReport()
            self._reported = time.monotonic()
            return self._now()

    def pause(self) -> None:
        """See `RequestQueue.pause`."""
        try:
            self._loop.wait(self._queue.pause(), lambda: None)
        except (EngineError, WorkerError) as error:
            self._fail(error)

    def resume(self) -> None:
        """See `RequestQueue.resume`."""
        self._loop.post(self._resume())

    def replaced(self, rank: int, engine: WorkerGroup) -> None:
        """Take over a new engine, which gets requests when the next rollout begins or engines resume."""
        place = self._ranks.index(rank)
        self._replicas[place].group = engine
        self._replaced.append(place)
        with self._changed:
            self._lost.pop(rank, None)

    def rows(
        self, shares: Sequence[tuple[Sequence[Kept], tuple[int, ...]]], version: int, no_experts: np.ndarray | None
    ) -> list[list[Any]]:
        """Store the training rows of each share, with the routed experts of its layers; return a reference to each. Ray
        resolves no references in lists."""
        return [
            [ray.put(self.own_rows(own, version, no_experts).with_layers(layers))] if own else []
            for own, layers in shares
        ]

    def own_rows(self, chosen: Sequence[Kept], version: int, no_experts: np.ndarray | None) -> TokenRows:
        """Return training rows; see `Episode.row`."""
        each = ((self._kept(one), one[1], one[-1]) for one in chosen)
        found = [(episode, 0.0 if own is None else own, row) for episode, own, row in each]
        return TokenRows.of([episode.row(own, version, no_experts, row) for episode, own, row in found])

    def apply(self, function: Callable[[TokenRows], Any], shared: SharedRows) -> Any:
        """Return `function` of rows of any workers."""
        return function(TokenRows.concatenated(ray.get(list(shared.parts))).select(shared.order))

    def write(self, target: SampleFile, samples: Sequence[tuple[int, Kept]]) -> None:
        """Write samples, each with its number in the rollout, in a thread."""
        chosen = [(index, replace(self._kept(one)), one[1]) for index, one in samples]
        self._writing.append(self._writer.submit(write_samples, target, chosen, worker=self._rank))

    def written(self) -> list[str]:
        """Wait for all writes; return their errors."""
        writing, self._writing = self._writing, []
        return [error for one in writing for error in one.result()]

    def save(self, file: Path, groups: Mapping[int, Sequence[Kept]]) -> str:
        """Write the episodes of prompts, by number, for a checkpoint. Return the error of the file system, if any."""
        try:
            save_groups(file, {number: [self._kept(one) for one in own] for number, own in groups.items()})
        except OSError as error:
            return str(error)
        return ""

    def save_begun(self, file: Path, prompts: Mapping[int, int]) -> str:
        """Write the episodes of groups whose end the launcher has not read, for a checkpoint. `prompts`: the numbers of
        their prompts by those of the groups. Return the error of the file system, if any."""

        async def copied() -> dict[int, list[Episode]]:
            ended = {
                prompt: [self._episodes[one] for one in self._ended[number]]
                for number, prompt in prompts.items()
                if number in self._ended
            }
            return ended | begun_episodes(
                {prompt: self._groups[number] for number, prompt in prompts.items() if number in self._groups}
            )

        try:
            save_groups(file, self._loop.wait(copied(), lambda: None))
        except OSError as error:
            return str(error)
        return ""

    def fetch(self, chosen: Sequence[Kept]) -> list[Episode]:
        """Return episodes."""
        return [self._kept(one) for one in chosen]

    def release(self, numbers: Sequence[int]) -> None:
        """Forget episodes."""
        for number in numbers:
            self._episodes.pop(number, None)
        # The thread of the groups may add others meanwhile.
        for group, own in list(self._ended.items()):
            if own[0] not in self._episodes:
                self._ended.pop(group, None)

    def _kept(self, one: Kept) -> Episode:
        number, _, is_left_out, length_penalty, _ = one
        episode = self._episodes[number]
        episode.is_left_out, episode.length_penalty = is_left_out, length_penalty
        return episode

    async def _clear(self, gone: Sequence[int]) -> list[int]:
        """Abort the requests of all engines that are not gone. Return the places of those that have died."""
        places = [place for place in range(len(self._replicas)) if place not in gone]
        outcomes = await asyncio.gather(*(self._replicas[place].clear() for place in places), return_exceptions=True)
        died = []
        for place, outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, WorkerError) and outcome.lost:
                self._note_loss(place, outcome)
                died.append(place)
            elif isinstance(outcome, BaseException):
                raise outcome
        return died

    async def _begin(self, tasks: Mapping[int, PromptTask]) -> None:
        try:
            with self._players.submit_as_batch():
                for number, task in tasks.items():
                    group = self._groups[number] = self._players.play(task)
                    group.on_end = partial(self._end, number)
                await asyncio.sleep(0)
        except Exception as error:  # raised in the launcher
            self._fail(error)

    async def _stop(self, numbers: Sequence[int]) -> dict[int, list[EpisodeRecord]]:
        groups = {number: self._groups.pop(number) for number in numbers if number in self._groups}
        for group in groups.values():
            group.on_end = None
        await self._players.stop(list(groups.values()))
        with self._changed:
            ended = {number: self._finished.pop(number) for number in numbers if number in self._finished}
        return ended | {number: self._played(group) for number, group in groups.items()}

    async def _resume(self) -> None:
        self._adopt_replaced()
        self._queue.resume()

    def _adopt_replaced(self) -> None:
        places, self._replaced = self._replaced, []
        self._queue.replaced(places)

    def _end(self, number: int, group: Group) -> None:
        del self._groups[number]
        if group.is_done:
            played = self._played(group)
            self._ended[number] = [one.number for one in played]
            with self._changed:
                self._finished[number] = played
                self._changed.notify_all()
        elif not group.played.cancelled() and (error := group.played.exception()) is not None:
            self._fail(error)

    def _played(self, group: Group) -> list[EpisodeRecord]:
        records = []
        for episode in group.episodes:
            if isinstance(episode, Episode):
                number = next(self._numbers)
                self._episodes[number] = episode
                records.append(EpisodeRecord.of(episode, self._rank, number))
        return records

    def _fail(self, error: BaseException) -> None:
        """Report an error, which ends the run's rollouts."""
        if not isinstance(error, LauncherError):
            log.error("an episode failed", exc_info=error)
            kind, text = type(error).__name__, "".join(traceback.format_exception(error))
            error = WorkerError(self._name, "rollouts", f"{kind}: {error}", details=text, raised=kind)
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _note_loss(self, place: int, error: WorkerError) -> None:
        with self._changed:
            self._lost[self._ranks[place]] = error
            self._changed.notify_all()

    def _has_news(self) -> bool:
        return bool(self._finished or self._lost or self._error)

    def _is_urgent(self) -> bool:
        return self._error is not None or not self._groups

    def _now(self) -> WorkerReport:
        if (now := time.monotonic()) > self._summed + _PROGRESS_S:
            self._summed, self._progress = now, {}
            for group in list(self._groups.values()):
                before = self._progress.get(group.task.rollout, PlayProgress())
                self._progress[group.task.rollout] = before + PlayProgress.of(group.episodes)
        finished, self._finished = self._finished, {}
        lost, self._lost = self._lost, {}
        queue = self._queue
        return WorkerReport(
            finished,
            lost,
            self._error,
            self._progress,
            queue.are_in_work,
            queue.unfinished_tokens,
            queue.steps,
            queue.busy_s,
            queue.idle_s,
            queue.taken_over,
            queue.repeated,
            queue.waiting,
            queue.describe(),
        )
