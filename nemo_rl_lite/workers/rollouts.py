"""Client of the rollout workers: gives them groups, collects records, and replaces dead workers."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_lite.cluster.calls import Call, result, wait
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import has_endpoint
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.losses.batch import CountedRows, Share, SharedRows, TokenRows, episode_numbers
from nemo_rl_lite.rollout.episode import Advantage, Episode, EpisodeRecord
from nemo_rl_lite.rollout.groups import Group, PlayProgress, PromptTask
from nemo_rl_lite.rollout.playing import ENDPOINT_FILE
from nemo_rl_lite.rollout.rollout import EpisodeStore, SampleFile
from nemo_rl_lite.rollout.saved import Writing, save_groups
from nemo_rl_lite.workers.reserve import load_rollout_workers, start_rollout_workers
from nemo_rl_lite.workers.rollout_worker import Kept, WorkerReport, kept

log = logging.getLogger(__name__)

# Seconds for an endpoint to end.
_CLOSE_S = 40.0


@dataclass(eq=False)
class _Member:
    """One rollout worker."""

    rank: int
    engines: list[int]
    """Ranks of its engines."""
    first: int = 0
    """Number of the first episode of its process. Those of earlier processes are lost."""
    alive: set[int] = field(default_factory=set)
    """Engines that live."""
    is_alive: bool = True
    playing: dict[int, Group] = field(default_factory=dict)
    done: dict[int, Group] = field(default_factory=dict)
    """Groups that a rollout keeps, and whose rows are there and not used yet."""
    report: WorkerReport = field(default_factory=WorkerReport)
    busy_before: float = 0.0
    """Busy seconds with earlier processes."""
    idle_before: float = 0.0
    steps_before: int = 0
    taken_over_before: int = 0
    repeated_before: int = 0

    @property
    def takes(self) -> bool:
        return self.is_alive and bool(self.alive)

    @property
    def load(self) -> tuple[float, int]:
        return len(self.playing) / len(self.alive), self.rank


class RolloutWorkers:
    """`Playground`, `Players`, `EpisodeStore` and `EngineQueue` over rollout workers.

    Each group goes to the worker with the fewest unfinished groups per engine. The groups of a dead worker are played
    again, and a new process replaces it. A worker without engines gives its groups to the others.
    """

    def __init__(
        self,
        group: WorkerGroup,
        engines: WorkerGroup,
        config: Config,
        model_path: Path,
        folder: Path,
        on_loss: Callable[[int, WorkerError], None],
        restore: Callable[[], None],
        on_worker_loss: Callable[[WorkerError], None],
        say: Callable[[str], None],
        dead: Collection[int] = (),
    ):
        """Connect started workers to engines. `on_loss`, `restore` and `dead`: see `RequestQueue`. `on_worker_loss` is
        called when a rollout worker dies, and may raise."""
        self.group, self._engines, self._config, self._model_path = group, engines, config, model_path
        self._folder, self._on_loss, self._restore = folder, on_loss, restore
        self._on_worker_loss, self._say = on_worker_loss, say
        self.store: EpisodeStore | None = self
        count = len(engines)
        owner = [rank * len(group) // count for rank in range(count)]
        self._members = [
            _Member(rank, [engine for engine in range(count) if owner[engine] == rank]) for rank in range(len(group))
        ]
        for member in self._members:
            member.alive = {rank for rank in member.engines if rank not in dead}
            self._connect(member)
        if config.generation.serve.enabled:
            say(f"the first rollout worker serves during rollouts; address and token are in {folder / ENDPOINT_FILE}")
        self._numbers = itertools.count()
        self._unplaced: dict[int, Group] = {}
        self._held_back, self._is_paused, self._session = 0, False, 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["RolloutWorkers"]:
        self._loop, self._failure, self._is_paused, self._tasks = asyncio.get_running_loop(), None, False, set()
        self._session = time.time_ns()
        try:
            await asyncio.gather(*(self._enter(member) for member in self._members))
            self._raise_failure()
            yield self
            while not all(member.is_alive for member in self._members):
                self._raise_failure()
                await asyncio.wait(self._tasks, timeout=1.0)
        finally:
            self._loop = None
            for task in self._tasks:
                task.cancel()
            for member in self._members:
                member.playing.clear()
            self._unplaced.clear()
        for member, leaving in [(member, self._call(member, "leave")) for member in self._members]:
            with suppress(WorkerError):
                [member.report] = wait(leaving)

    def close(self) -> None:
        """End the endpoint of the first worker, and remove its file."""
        if has_endpoint(self._config):
            with suppress(WorkerError):
                wait(self.group.call_beside(0, "close", phase="rollouts"), timeout_s=_CLOSE_S)
            # A dead worker leaves it.
            (self._folder / ENDPOINT_FILE).unlink(missing_ok=True)

    # The players of a collector.

    @contextmanager
    def submit_as_batch(self) -> Iterator[None]:
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1
            self._place()

    def play(self, task: PromptTask) -> Group:
        group = Group(task, asyncio.get_running_loop().create_future())
        self._start(group)
        return group

    def play_again(self, group: Group) -> None:
        self.release(_records([group]))
        group.restart()
        self._start(group)

    async def stop(self, groups: Sequence[Group]) -> None:
        self._keep_no_longer(set(groups))
        unfinished = {group for group in groups if not group.played.done()}
        for number in [number for number, group in self._unplaced.items() if group in unfinished]:
            del self._unplaced[number]
        for member in self._members:
            own = {number: group for number, group in member.playing.items() if group in unfinished}
            for number in own:
                del member.playing[number]
            if own and member.is_alive and self._failure is None:
                with suppress(WorkerError):
                    [stopped] = await result(self._call(member, "stop", list(own)))
                    for number, played in stopped.items():
                        own[number].episodes = played
        for group in unfinished:
            group.played.cancel()

    async def discard(self, groups: Sequence[Group]) -> None:
        await self.stop(groups)
        self.release(_records(groups))

    def progress(self, groups: Sequence[Group]) -> PlayProgress:
        whole = PlayProgress.of([episode for group in groups if group.is_done for episode in group.episodes])
        for member in self._members:
            for number in {group.task.rollout for group in groups}:
                whole += member.report.progress.get(number, PlayProgress())
        return whole

    def save_begun(self, groups: Mapping[int, Group], file: Path) -> Writing:
        prompts, saving = {group: number for number, group in groups.items()}, []
        for member in self._members:
            own = {number: prompts[group] for number, group in member.playing.items() if group in prompts}
            if own and member.is_alive:
                part = file.with_name(f"{file.name}-{member.rank}.parquet")
                saving.append((part, self._call(member, "save_begun", part, own)))
        # What an earlier run has played of prompts that wait for a worker.
        saved = {prompts[one]: one.task.saved for one in self._unplaced.values() if one in prompts}
        kept = {number: own for number, one in saved.items() if one is not None and (own := one.read())}
        here = file.with_name(f"{file.name}.parquet")

        def write() -> list[Path]:
            if kept:
                save_groups(here, kept)
            return [*([here] if kept else []), *_saved_parts(saving)]

        return write

    @property
    def are_in_work(self) -> bool:
        return any(member.report.are_in_work for member in self._members)

    @property
    def unfinished_tokens(self) -> int:
        return sum(member.report.unfinished_tokens for member in self._members)

    # The queue of a source.

    @property
    def has_engines(self) -> bool:
        return any(member.alive for member in self._members)

    @property
    def steps(self) -> int:
        return sum(member.steps_before + member.report.steps for member in self._members)

    @property
    def busy_s(self) -> float:
        """See `RequestQueue.busy_s`."""
        return sum(member.busy_before + member.report.busy_s for member in self._members)

    @property
    def idle_s(self) -> float:
        """Return the mean seconds in which no engine of a worker had a request."""
        return sum(member.idle_before + member.report.idle_s for member in self._members) / len(self._members)

    @property
    def taken_over(self) -> int:
        """See `RequestQueue.taken_over`."""
        return sum(member.taken_over_before + member.report.taken_over for member in self._members)

    @property
    def repeated(self) -> int:
        """See `RequestQueue.repeated`."""
        return sum(member.repeated_before + member.report.repeated for member in self._members)

    def describe(self) -> str:
        """See `RequestQueue.describe`."""
        return "; ".join(f"rollout worker {member.rank}: {member.report.description}" for member in self._members)

    async def pause(self) -> None:
        """See `RequestQueue.pause`."""
        self._is_paused = True
        pausing = [result(self._call(member, "pause")) for member in self._members if member.is_alive]
        for outcome in await asyncio.gather(*pausing, return_exceptions=True):
            # A dead worker restarts, and is paused then.
            if isinstance(outcome, BaseException) and not (isinstance(outcome, WorkerError) and outcome.lost):
                raise outcome
        self._raise_failure()

    def resume(self) -> None:
        """See `RequestQueue.resume`."""
        self._is_paused = False
        for member in self._members:
            if member.is_alive:
                self._watch(member, self._call(member, "resume"))
        self._place()

    def replaced(self, ranks: Sequence[int]) -> None:
        """See `RequestQueue.replaced`."""
        for rank in ranks:
            member = next(one for one in self._members if rank in one.engines)
            member.alive.add(rank)
            with suppress(WorkerError):
                wait(self._call(member, "replaced", rank, self._engines.part([rank])))
        if self._loop is not None and not self._is_paused:
            self._loop.call_soon_threadsafe(self.resume)

    # The store of episodes.

    def has(self, record: EpisodeRecord) -> bool:
        return record.number >= self._members[record.worker].first

    def look_for_losses(self) -> None:
        before = [member.first for member in self._members]
        for rank in self.group.lost():
            # Otherwise its loss has been noticed meanwhile.
            if self._members[rank].first == before[rank]:
                self._members[rank].first = time.time_ns()

    def rows(self, records: Sequence[EpisodeRecord], advantages: Sequence[Advantage], version: int) -> CountedRows:
        self._forget_groups(records)
        each = [
            (record, kept(record, advantage, number), counts)
            for record, advantage in zip(records, advantages, strict=True)
            for number, counts in enumerate(record.rows)
        ]
        rewards = [0.0 if one.shaped_reward is None else one.shaped_reward for one, _, _ in each]
        ages = [
            {version - own: count for own, count in counts.versions.items()} if one.is_trained else {}
            for one, _, counts in each
        ]
        no_experts = next((one.no_experts for one in records if one.no_experts is not None), None)
        source = _Rows(self, [one for one, _, _ in each], [one for _, one, _ in each], version, no_experts)
        lengths = np.array([counts.length for _, _, counts in each], np.int64)
        episodes = episode_numbers([one.row_count for one in records])
        return CountedRows(source, np.arange(len(each)), lengths, np.array(rewards, np.float64), ages, episodes)

    def require(self, records: Sequence[EpisodeRecord]) -> None:
        """Raise WorkerError if episodes were lost with a rollout worker."""
        for one in records:
            if not self.has(one):
                worker = f"{self.group.name} rank {one.worker}"
                raise WorkerError(worker, "rollouts", "its process died with the episodes of a rollout", lost=True)

    def fetch(self, records: Sequence[EpisodeRecord]) -> list[Episode]:
        self.require(records)
        found: dict[int, Episode] = {}
        for member, places in self._by_member(records):
            [episodes] = wait(self._call(member, "fetch", [kept(records[place]) for place in places]))
            found |= zip(places, episodes, strict=True)
        return [found[place] for place in range(len(records))]

    def write(
        self, target: SampleFile, records: Sequence[EpisodeRecord], advantages: Sequence[Advantage | None]
    ) -> Callable[[], list[str]]:
        self.require(records)
        acknowledged = []
        for member, places in self._by_member(records):
            samples = [(place, kept(records[place], advantages[place])) for place in places]
            wait(self._call(member, "write", target, samples))
            # Ask at once: an acknowledged write does not need the worker.
            acknowledged.append(self.group.call_beside(member.rank, "written", phase="rollouts"))
        return lambda: [error for errors in wait(*acknowledged) for error in errors]

    def save(self, file: Path, groups: Mapping[int, Sequence[EpisodeRecord]]) -> Callable[[], list[Path]]:
        saving = []
        for member in self._members:
            own = {
                number: [kept(one) for one in records]
                for number, records in groups.items()
                if records[0].worker == member.rank and self.has(records[0])
            }
            if own:
                part = file.with_name(f"{file.name}-{member.rank}.parquet")
                saving.append((part, self._call(member, "save", part, own)))
        return partial(_saved_parts, saving)

    def release(self, records: Sequence[EpisodeRecord]) -> None:
        self._forget_groups(records)
        there = [one for one in records if self.has(one)]
        for member, places in self._by_member(there):
            # A worker that has died meanwhile has forgotten them.
            self._call(member, "release", [there[place].number for place in places])

    def _forget_groups(self, records: Sequence[EpisodeRecord]) -> None:
        used = {(one.worker, one.number) for one in records}
        groups = [group for member in self._members for group in list(member.done.values())]
        self._keep_no_longer(
            {group for group in groups if any((one.worker, one.number) in used for one in _records([group]))}
        )

    def _keep_no_longer(self, groups: Collection[Group]) -> None:
        """Do not play these finished groups again if their worker dies."""
        for member in self._members:
            # Called in the main thread and in that of the rollouts.
            for number in [number for number, group in list(member.done.items()) if group in groups]:
                member.done.pop(number, None)

    def _by_member(self, records: Sequence[EpisodeRecord]) -> Iterator[tuple[_Member, list[int]]]:
        for member in self._members:
            if places := [place for place, one in enumerate(records) if one.worker == member.rank]:
                yield member, places

    def _call(self, member: _Member, method: str, *arguments: Any) -> Call:
        return self.group.call_one(member.rank, [(method, arguments)], "rollouts")

    # Workers.

    def _connect(self, member: _Member) -> None:
        member.first = time.time_ns()
        engines = {rank: self._engines.part([rank]) for rank in member.engines}
        dead = [rank for rank in member.engines if rank not in member.alive]
        wait(self._call(member, "connect", engines, dead, member.first))

    async def _enter(self, member: _Member) -> None:
        with self._handling(member):
            await result(self._call(member, "enter", self._session))
            self._run(self._listen(member))

    def _start(self, group: Group) -> None:
        if self._failure is not None:
            group.played.set_exception(self._failure)
            return
        self._unplaced[next(self._numbers)] = group
        self._place()

    def _place(self) -> None:
        """Give groups to workers, in order."""
        if self._held_back or self._loop is None:
            return
        given: dict[_Member, dict[int, PromptTask]] = {}
        able = [member for member in self._members if member.takes]
        while self._unplaced and able:
            number = next(iter(self._unplaced))
            member, group = min(able, key=lambda one: one.load), self._unplaced.pop(number)
            member.playing[number] = group
            given.setdefault(member, {})[number] = group.task
        for member, tasks in given.items():
            self._watch(member, self._call(member, "play", tasks))

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self, member: _Member, call: Call) -> None:
        """Handle the error of a call."""

        async def watch() -> None:
            with self._handling(member):
                await result(call)

        self._run(watch())

    async def _listen(self, member: _Member) -> None:
        """Collect the reports of a worker's process."""
        while member.is_alive and self._failure is None:
            with self._handling(member):
                [report] = await result(self.group.call_beside(member.rank, "report", self._session, phase="rollouts"))
                self._read(member, report)

    @contextmanager
    def _handling(self, member: _Member) -> Iterator[None]:
        first = member.first
        try:
            yield
        except Exception as error:  # reaches the groups
            loss = self._loss_of_worker(error)
            if loss is None:
                self._fail(error)
            elif member.is_alive and member.first == first:
                self._lose(member, loss)

    def _loss_of_worker(self, error: Exception) -> WorkerError | None:
        if isinstance(error, WorkerError) and error.lost and error.worker.startswith(self.group.name):
            return error
        return None

    def _read(self, member: _Member, report: WorkerReport) -> None:
        member.report = report
        if report.error is not None:
            raise report.error
        for number, played in report.finished.items():
            self._finish(member, number, played)
        for rank, error in report.lost.items():
            member.alive.discard(rank)
            self._on_loss(rank, error)
        if report.lost and not member.alive:
            self._give_up_groups(member)

    def _finish(self, member: _Member, number: int, played: Sequence[EpisodeRecord]) -> None:
        group = member.playing.pop(number, None)
        if group is None:
            self._watch(member, self._call(member, "release", [one.number for one in played]))
            return
        member.done[number] = group
        group.end(played)

    def _give_up_groups(self, member: _Member) -> None:
        """Give the groups of a worker without engines to the others, or restore all engines."""
        if not self.has_engines:
            self._restore()
            return
        # The others sample these responses again.
        member.repeated_before += member.report.waiting
        self._run(self._stop_and_forget(member, list(member.playing)))
        self._unplaced, member.playing = {**member.playing, **self._unplaced}, {}
        self._place()

    async def _stop_and_forget(self, member: _Member, numbers: Sequence[int]) -> None:
        with self._handling(member):
            [stopped] = await result(self._call(member, "stop", numbers))
            records = [one for played in stopped.values() for one in played]
            await result(self._call(member, "release", [one.number for one in records]))

    def _lose(self, member: _Member, error: WorkerError) -> None:
        """Play the groups of a dead worker again, and replace it."""
        member.is_alive, member.first = False, time.time_ns()
        done, member.done = member.done, {}
        for group in done.values():
            group.restart()
        self._unplaced = {**done, **member.playing, **self._unplaced}
        member.playing = {}
        try:
            self._on_worker_loss(error)
        except WorkerError as last:
            self._fail(last)
            return
        member.busy_before += member.report.busy_s
        member.idle_before += member.report.idle_s
        member.steps_before += member.report.steps
        member.taken_over_before += member.report.taken_over
        member.repeated_before += member.report.repeated
        member.report = WorkerReport()
        self._run(self._replace(member, error))
        self._place()

    async def _replace(self, member: _Member, loss: WorkerError) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._start_again, member)
            await result(self._call(member, "enter", self._session))
            if self._is_paused:
                await result(self._call(member, "pause"))
        except Exception as error:  # the loss reaches the groups
            if (next_loss := self._loss_of_worker(error)) is not None:
                self._lose(member, next_loss)
                return
            self._say(f"the restart failed: {error}")
            self._fail(loss)
            return
        self._say(f"{self.group.name} rank {member.rank} has restarted")
        member.is_alive = True
        self._run(self._listen(member))
        if not self._is_paused:
            # The engines may still be paused by the dead process.
            self._watch(member, self._call(member, "resume"))
        self._place()

    def _start_again(self, member: _Member) -> None:
        limit_s = self._config.cluster.start_timeout_s
        part = self.group.replace([member.rank])
        wait(load_rollout_workers(part), timeout_s=limit_s)
        wait(
            start_rollout_workers(self._config, part, self._model_path, self._folder, [member.rank]), timeout_s=limit_s
        )
        self._connect(member)

    def _fail(self, error: Exception) -> None:
        """End all play; the error reaches the groups."""
        self._failure = self._failure or error
        for group in [*self._unplaced.values(), *(one for member in self._members for one in member.playing.values())]:
            if not group.played.done():
                group.played.set_exception(self._failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _saved_parts(saving: Sequence[tuple[Path, Call]]) -> list[Path]:
    """Wait for files; return those whose workers have not died. Raises OSError."""
    return [part for part, call in saving if _is_saved(part, call)]


def _is_saved(part: Path, saving: Call) -> bool:
    """Wait until a rollout worker has written a file. Return False if it died. Raises OSError."""
    try:
        [error] = wait(saving)
    except WorkerError as loss:
        if not loss.lost:
            raise
        log.warning("%s: the checkpoint has its prompts without their episodes", loss)
        part.unlink(missing_ok=True)
        return False
    if error:
        raise OSError(error)
    return True


def _records(groups: Iterable[Group]) -> list[EpisodeRecord]:
    return [one for group in groups for one in group.episodes if isinstance(one, EpisodeRecord)]


@dataclass(frozen=True)
class _Rows:
    """`RowSource` of a rollout's records."""

    workers: RolloutWorkers
    records: Sequence[EpisodeRecord]
    """The record of each row."""
    kept: Sequence[Kept]
    version: int
    no_experts: np.ndarray | None

    def share(self, shares: Sequence[Share]) -> list[SharedRows]:
        """See `RowSource.share`."""
        self.workers.require(self.records)
        calls, owned = [], []
        for member, _ in self.workers._by_member(self.records):
            own = [[row for row in rows if self.records[row].worker == member.rank] for rows, _ in shares]
            asked = [([self.kept[row] for row in rows], layers) for rows, (_, layers) in zip(own, shares, strict=True)]
            calls.append(self.workers._call(member, "rows", asked, self.version, self.no_experts))
            owned.append(own)
        references = wait(*calls)
        found = []
        for number, (rows, _) in enumerate(shares):
            joined = [row for own in owned for row in own[number]]
            place = {row: index for index, row in enumerate(joined)}
            parts = tuple(reference for own in references for reference in own[number])
            found.append(SharedRows(parts, tuple(place[row] for row in rows)))
        return found

    def fetch(self, index: Sequence[int]) -> TokenRows:
        """See `RowSource.fetch`."""
        self.workers.require(self.records)
        parts, joined = [], []
        for member, places in self.workers._by_member(self.records):
            of_member = set(places)
            own = [row for row in index if row in of_member]
            if own:
                chosen = [self.kept[row] for row in own]
                parts += wait(self.workers._call(member, "own_rows", chosen, self.version, self.no_experts))
                joined += own
        place = {row: index for index, row in enumerate(joined)}
        return TokenRows.concatenated(parts).select([place[row] for row in index])

    def apply(self, function: Callable[[TokenRows], Any], index: Sequence[int]) -> Any:
        """See `RowSource.apply`: a worker with the largest share of the rollout calls it."""
        [shared] = self.share([(index, ())])
        member, _ = max(self.workers._by_member(self.records), key=lambda one: len(one[1]))
        [found] = wait(self.workers._call(member, "apply", function, shared))
        return found
