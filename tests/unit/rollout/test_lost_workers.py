"""Rollout workers that die: what the launcher plays again, and what the others keep."""

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
from pyarrow import parquet

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutCollector, RolloutTask
from nemo_rl_lite.rollout.episode import Episode, EpisodeRecord
from nemo_rl_lite.rollout.groups import Group, LocalPlayers, PromptTask
from nemo_rl_lite.rollout.queue import AsyncRolloutSource, Staleness
from nemo_rl_lite.rollout.saved import RolloutState, begin_save, load_groups, load_rollouts, save_groups
from nemo_rl_lite.rollout.source import OnPolicy
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers import rollout_worker, rollouts
from nemo_rl_lite.workers.rollout_worker import WorkerReport, kept
from tests.unit.rollout.fleet import LONGEST, Fleet, sampler
from tests.unit.rollout.script import collected_by, judged_by

SAMPLES = 2
NO_ERRORS = {"": ErrorShares(0.0, 0.0)}


class Worker:
    """Plays a group per report, in memory. It dies instead of the group after the first `most`."""

    def __init__(self, rank: int, most: float):
        self.rank, self.most, self.tasks, self.episodes = rank, most, {}, {}
        self.played: list[str] = []
        self.is_dead = False

    def connect(self, engines, dead, first):
        self.numbers = count(first)

    def play(self, tasks):
        self.tasks |= tasks

    def report(self, session):
        finished = {}
        if self.tasks:
            if len(self.played) == self.most:
                self.is_dead = True
                raise dead(self.rank)
            number = next(iter(self.tasks))
            finished[number] = self._played(self.tasks.pop(number))
        return WorkerReport(finished)

    def stop(self, numbers):
        return {number: self._played(self.tasks.pop(number)) for number in numbers if number in self.tasks}

    def release(self, numbers):
        for number in numbers:
            del self.episodes[number]

    def save(self, file, groups):
        save_groups(file, {number: self.fetch(own) for number, own in groups.items()})
        return ""

    def fetch(self, chosen):
        return [self.episodes[number] for number, *_ in chosen]

    def leave(self):
        return WorkerReport()

    def _played(self, task) -> list[EpisodeRecord]:
        self.played.append(task.problem.messages[0]["content"])
        rewards = (0.0, 1.0) if task.problem.answer == "mixed" else (1.0, 1.0)
        records = []
        for number, reward in zip(self.numbers, rewards, strict=False):
            self.episodes[number] = Episode(task.problem, [1, 2], 2, reward=reward)
            records.append(EpisodeRecord.of(self.episodes[number], self.rank, number))
        return records


def dead(rank: int) -> WorkerError:
    return WorkerError(f"rollouts rank {rank}", "rollouts", "the process died", lost=True)


class Workers:
    """The part of `WorkerGroup` that the launcher uses. A call is done at once."""

    name = "rollouts"

    def __init__(self, *most: float):
        self.workers = [Worker(rank, own) for rank, own in enumerate(most)]
        self.lost_starts = 0

    def __len__(self):
        return len(self.workers)

    def part(self, ranks):
        return self

    def lost(self):
        return [worker.rank for worker in self.workers if worker.is_dead]

    def replace(self, ranks):
        for rank in ranks:
            self.workers[rank] = Worker(rank, float("inf"))
            self.workers[rank].is_dead, self.lost_starts = self.lost_starts > 0, self.lost_starts - 1
        return self

    def call_one(self, rank, methods, phase):
        [(method, arguments)] = methods
        worker = self.workers[rank]
        if worker.is_dead:
            return dead(rank)
        try:
            return getattr(worker, method, lambda *_: None)(*arguments)
        except WorkerError as error:
            return error
        except KeyError as error:
            return WorkerError(f"rollouts rank {rank}", phase, f"there is no episode {error}")

    def call_beside(self, rank, method, *arguments, phase):
        return self.call_one(rank, [(method, arguments)], phase)


@pytest.fixture
def players(monkeypatch) -> Iterator:
    async def result(call):
        await asyncio.sleep(0.001)
        return wait(call)

    def wait(*calls, timeout_s=None):
        for call in calls:
            if isinstance(call, WorkerError):
                raise call
        return list(calls)

    monkeypatch.setattr(rollouts, "result", result)
    monkeypatch.setattr(rollouts, "wait", wait)
    for name in ("load_rollout_workers", "start_rollout_workers"):
        monkeypatch.setattr(rollouts, name, lambda *_: None)

    def make(group: Workers, losses: list[WorkerError]) -> rollouts.RolloutWorkers:
        own = (group, group, compose_config(), "model", "folder")
        return rollouts.RolloutWorkers(*own, lambda *_: None, lambda: None, losses.append, lambda _: None)

    return make


def task(kinds: list[str], useful: int, **options) -> RolloutTask:
    """A rollout of some useful prompts, the first of which are of these kinds and the others mixed."""

    def problem(number: int) -> Problem:
        return Problem(chat(f"p {number}"), kinds[number] if number < len(kinds) else "mixed")

    sampling = Sampling(1.0, 1.0, None, 8, (0,), ())
    return RolloutTask(problem, useful, SAMPLES, sampling, 0, useful=True, **options)


@pytest.mark.parametrize("played", range(3))
def test_a_released_rollout_leaves_nothing_in_a_worker_whenever_another_one_dies(players, played):
    group, losses = Workers(float("inf"), played), []
    workers = players(group, losses)
    collector = RolloutCollector(workers, NO_ERRORS)
    rollout = collector.collect(task(["same", "mixed", "same", "same"], 4, oversample=3.0))
    assert asked(rollout) == ["p 1", "p 4", "p 5", "p 6"] and len(losses) == 1
    rollout.release()
    assert [len(worker.episodes) for worker in group.workers] == [0, 0]


def test_a_complete_rollout_that_is_lost_leaves_nothing_of_its_first_play(players):
    group, losses = Workers(float("inf"), float("inf")), []
    workers = players(group, losses)
    collector, own = RolloutCollector(workers, NO_ERRORS), task(["same", "mixed"], 4, oversample=3.0)

    async def run() -> None:
        async with workers.serving():
            rollout = await collector.gather(own, workers)
            group.workers[1].is_dead = True
            while not rollout.is_lost:
                await asyncio.sleep(0.01)
            rollout = await collector.gather(own, workers)
            assert asked(rollout) == ["p 1", "p 2", "p 3", "p 4"] and not rollout.is_lost
            rollout.release()

    asyncio.run(run())
    assert [len(worker.episodes) for worker in group.workers] == [0, 0]


def test_a_worker_that_dies_while_it_restarts_is_restarted_again(players):
    group, losses = Workers(1), []
    group.lost_starts = 2
    rollout = RolloutCollector(players(group, losses), NO_ERRORS).collect(task([], 3, oversample=1.0))
    assert asked(rollout) == ["p 0", "p 1", "p 2"] and len(losses) == 3


def test_a_worker_that_dies_between_two_rollouts_plays_none_of_the_first_again(players):
    group, losses = Workers(float("inf"), float("inf")), []
    collector = RolloutCollector(players(group, losses), NO_ERRORS)
    collector.collect(task(["same"] * 3, 2, oversample=4.0)).release()
    group.workers[0].is_dead = True
    group.workers[1].played.clear()
    collector.collect(task(["mixed"], 1, oversample=1.0)).release()
    assert len(losses) == 1
    assert [*group.workers[0].played, *group.workers[1].played] == ["p 0"]


def test_only_the_episodes_of_living_workers_are_released(players):
    group, losses = Workers(float("inf"), float("inf")), []
    workers = players(group, losses)
    rollout = RolloutCollector(workers, NO_ERRORS).collect(task([], 4, oversample=1.0))
    first = rollout.records
    assert {one.worker for one in first} == {0, 1}
    workers._members[0].first = max(one.number for one in first if one.worker == 0) + 1
    rollout.release()
    assert not group.workers[1].episodes


def test_a_worker_that_fails_to_begin_is_not_restarted(players):
    group, losses = Workers(float("inf")), []
    workers = players(group, losses)

    def enter(session):
        raise KeyError(session)

    group.workers[0].enter = enter
    with pytest.raises(WorkerError, match="there is no episode"):
        RolloutCollector(workers, NO_ERRORS).collect(task([], 1, oversample=1.0))
    assert losses == []


def test_asyncio_reports_no_failed_group(players, caplog):
    group = Workers(float("inf"))

    def report(session):
        raise KeyError(session)

    group.workers[0].report = report
    with pytest.raises(WorkerError, match="there is no episode"):
        RolloutCollector(players(group, []), NO_ERRORS).collect(task([], 3, oversample=1.0))
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_group_may_be_lost_just_after_its_end():
    class Restarting(LocalPlayers):
        """Ends each group, and restarts it at once."""

        def __init__(self):
            pass

        def play(self, task):
            loop = asyncio.get_running_loop()
            group = Group(task, loop.create_future())
            episodes = [Episode(task.problem, [1, 2], 2, reward=reward) for reward in (0.0, 1.0)]
            group.end(episodes)
            group.restart()
            loop.call_later(0.01, group.end, episodes)
            loop.call_soon(lambda: group.on_end and group.on_end(group))
            return group

        def submit_as_batch(self):
            return pytest.MonkeyPatch.context()

    own = Restarting()
    rollout = asyncio.run(RolloutCollector(own, NO_ERRORS).gather(task([], 2, oversample=1.0), own))
    assert asked(rollout) == ["p 0", "p 1"]


@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("oversample", [1.0, 3.0])
def test_a_worker_that_dies_after_a_rollout_costs_only_its_groups(players, has_rows, oversample):
    group, losses = Workers(float("inf"), float("inf")), []
    own, fleet = sampler(Fleet(), prompts=4, use_dynamic_sampling=True, oversample=oversample), Fleet()
    own.collector = RolloutCollector(players(group, losses), NO_ERRORS)
    own.order._training = All("mixed")
    source = OnPolicy(own, fleet)
    rollout = source.take(1, print)
    assert not rollout.has_died()
    if has_rows:
        rollout.rows([0.0] * 8, 0)
    lost = [one.worker == 1 for one in rollout.records[::SAMPLES]]
    group.workers[1].is_dead = True
    group.workers[0].played.clear()
    assert rollout.has_died() and 0 < sum(lost) < 4
    again = source.take_again(1, print)
    assert not again.has_died() and fleet.refitted == [0] and len(losses) == 1
    prompts = [f"p {number}" for number in range(4)]
    assert asked(again) == prompts and own.order.state()["position"] == 4
    played = [*group.workers[0].played, *group.workers[1].played]
    # Oversampling begins later prompts, too.
    assert sorted(set(played) & set(prompts)) == [prompt for prompt, gone in zip(prompts, lost, strict=True) if gone]
    again.release()
    assert [len(worker.episodes) for worker in group.workers] == [0, 0]


def test_an_asynchronous_rollout_is_replaced_in_the_same_way(players):
    class Engines:
        queue = None

        def refit(self, version):
            return {}

        def admit(self): ...

        finish_generation = dict

    group, losses, engines = Workers(float("inf"), float("inf")), [], Engines()
    own = sampler(Fleet(), prompts=4)
    engines.queue = players(group, losses)
    own.collector = RolloutCollector(engines.queue, NO_ERRORS)
    own.order._training = All("mixed")
    source = AsyncRolloutSource(own, engines, Staleness(1, in_flight=False), 0, 3, [], 60.0)
    try:
        source.publish(0)
        rollout = source.take(1, print)
        rollout.rows([0.0] * 8, 0)
        assert {one.worker for one in rollout.records} == {0, 1}
        group.workers[1].is_dead = True
        assert rollout.has_died()
        again = source.take_again(1, print)
        assert asked(again) == [f"p {number}" for number in range(4)] and not again.has_died()
        source.publish(1)
        assert asked(source.take(2, print)) == [f"p {number}" for number in range(4, 8)] and len(losses) == 1
    finally:
        source.close()


@pytest.mark.parametrize("dead", [[], [1], [0, 1]])
def test_a_checkpoint_has_the_episodes_of_living_workers(players, tmp_path, dead):
    group = Workers(float("inf"), float("inf"))
    workers, own = players(group, []), task([], 4, oversample=1.0)
    RolloutCollector(workers, NO_ERRORS).collect(own)
    for rank in dead:
        group.workers[rank].is_dead = True
    groups = {number: one.episodes for number, one in enumerate(own.groups)}
    begin_save(tmp_path, RolloutState(3, [[number] for number in groups]), groups, workers)()
    [saved] = load_rollouts(tmp_path)
    kept = {number: records for number, records in groups.items() if records[0].worker not in dead}
    assert len(saved.state.draws) == 4 and set(saved.groups) == set(kept)
    for number, records in kept.items():
        worker = group.workers[records[0].worker]
        assert saved.groups[number].read() == [worker.episodes[one.number] for one in records]
    assert len(list(tmp_path.glob("*"))) == 3 - len(dead)
    assert parquet.read_metadata(tmp_path / "rollout-00000003.parquet").num_rows == 0


def test_a_checkpoint_has_what_an_earlier_run_has_played_of_prompts_that_wait_for_a_worker(players, tmp_path):
    workers, problem = players(Workers(float("inf")), []), Problem(chat("p"), "1")
    begun = [Episode(problem, [1, 2], 2), Episode(problem, [1, 2], 2, reward=1.0, stage="done")]
    save_groups(tmp_path / "earlier.parquet", {7: begun})
    saved = load_groups(tmp_path / "earlier.parquet")[7]
    sampling = Sampling(1.0, 1.0, None, 8, (0,), ())

    async def run() -> list:
        async with workers.serving():
            workers._members[0].alive.clear()
            waits = workers.play(PromptTask(0, 0, problem, 2, sampling, 0, 1, saved))
            return workers.save_begun({7: waits}, tmp_path / "begun")()

    [file] = asyncio.run(run())
    found = load_groups(file)[7]
    assert found.is_begun and found.read() == begun


def test_a_worker_saves_groups_whose_end_the_launcher_has_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_worker, "ChatTokenizer", lambda *_: None)
    worker, fleet = rollout_worker.RolloutWorker(compose_config(), "", str(tmp_path), 0, "rollouts", "."), Fleet()
    judge, fleet.replicas[0].weights = judged_by(lambda *_: 1.0), 0
    worker._players = collected_by(fleet, judge, 64, NO_ERRORS[""]).playground  # pyrefly: ignore
    worker._numbers, worker._queue, worker._replaced = count(), fleet.queue, []
    problem, sampling = Problem(chat("p"), "1"), Sampling(1.0, 1.0, None, LONGEST, (0,), ())
    file, finished = tmp_path / "begun.parquet", {}
    worker.enter(1)
    worker.play({5: PromptTask(0, 0, problem, SAMPLES, sampling, 0, 1)})
    while not finished:
        finished = worker.report(1).finished
    assert worker.save_begun(file, {5: 2}) == ""
    saved, played = load_groups(file)[2], worker.fetch([kept(one) for one in finished[5]])
    assert not saved.is_begun and saved.read() == [replace(one, spans=[]) for one in played]
    worker.release([one.number for one in finished[5]])
    assert worker.save_begun(file, {5: 2}) == "" and load_groups(file) == {}
    worker.leave()


@pytest.mark.parametrize("others", [0, 1])
def test_only_tokens_that_an_engine_continues_are_taken_over(players, others):
    """Without engines, a worker gives its prompts to the others, or waits for new engines."""
    group = Workers(*[float("inf")] * (1 + others))
    workers = players(group, [])

    async def run() -> None:
        async with workers.serving():
            workers._read(workers._members[0], WorkerReport(lost={0: dead(0)}, waiting=6))
            assert (workers.taken_over, workers.repeated) == (0, 6 * others)

    asyncio.run(run())


def test_a_file_that_a_worker_cannot_write_fails_the_checkpoint(players, tmp_path):
    group = Workers(float("inf"))
    workers, own = players(group, []), task([], 1, oversample=1.0)
    RolloutCollector(workers, NO_ERRORS).collect(own)
    group.workers[0].save = lambda file, groups: "No space left on device"
    saving = begin_save(tmp_path, RolloutState(3, [[0]]), {0: own.groups[0].episodes}, workers)
    with pytest.raises(OSError, match="No space left"):
        saving()


class All:
    """A training set of prompts of one kind."""

    def __init__(self, kind: str):
        self.kind = kind

    def problem(self, number: int) -> Problem:
        return Problem(chat(f"p {number}"), self.kind)


def asked(rollout) -> list[str]:
    return [episode.problem.messages[0]["content"] for episode in rollout.whole()[::SAMPLES]]
