"""Engines that come and go: lost, late, ended and started on request. Responses stay the same."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.rollout import background, collector
from nemo_rl_lite.rollout.queue import AsyncRolloutSource, Staleness
from nemo_rl_lite.rollout.source import OnPolicy, RolloutSource
from nemo_rl_lite.workers.budget import RestartBudget
from nemo_rl_lite.workers.recovery import EngineRules, RecoveringGeneration
from tests.unit.rollout.fleet import Fleet, Replica, asked, sampler, versions

STEPS = 6
LOST = WorkerError("policy rank 0", "refit", "the process died", lost=True)


class Process(Replica):
    """An engine that takes long enough for others to come and go."""

    seconds = 0.01


class Seat:
    """The place of an engine, as the queue knows it. Messages reach the process that `renew` has set."""

    def __init__(self, process: Process):
        self.process = process

    def __getattr__(self, name: str):
        return getattr(self.process, name)


class Engines:
    """`RemoteGeneration`, its group of processes, and the policy's `WeightSync`."""

    def __init__(self, count: int, started: bool):
        self.processes = [Process() for _ in range(count)]
        self.engines, self.live, self.version = count, list(range(count)) if started else [], -1
        self.replicas, self.group = [Seat(process) for process in self.processes], self
        self.refits: list[tuple[int, ...]] = []
        self.may_start, self.broken = threading.Event(), set[int]()
        self.may_start.set()

    # The group.

    def replace(self, ranks):
        self.end(ranks)
        for rank in ranks:
            self.processes[rank] = Process()
        return list(ranks)

    def end(self, ranks):
        for rank in ranks:
            self.processes[rank].is_dead = True

    def part(self, ranks):
        found = Engines(0, started=True)
        found.lost = lambda: [rank for rank in ranks if self.processes[rank].is_dead]
        return found

    def start(self, ranks) -> None:
        self.may_start.wait(30)
        if self.broken & set(ranks):
            raise WorkerError(f"generation rank {ranks[0]}", "start", "out of memory")

    # The client.

    def renew(self, ranks):
        for rank in ranks:
            self.replicas[rank].process = self.processes[rank]

    def only(self, ranks):
        found = Engines(0, started=True)
        found.live = ranks
        return found

    def finish_generation(self):
        return {}

    # The weights.

    def disconnect(self): ...

    def make_room(self): ...

    def refit(self, version, engines=None):
        live = (engines or self).live
        for rank in live:
            if self.processes[rank].is_dead:
                raise WorkerError(f"generation rank {rank}", "refit", "the process died", lost=True)
            assert not self.processes[rank].under_way, "new weights while an engine works"
            self.processes[rank].weights = version
        self.version = version
        self.refits.append(tuple(live))
        return {}


class Elastic(Fleet):
    """Engines of which `least` must live, with the recovery of a run; `wanted` is what a user requests."""

    def __init__(self, count: int, least: int, policy_waits: bool, started: bool = True, restarts: int = 3):
        self.engines, self.wanted, self.step, self.said = Engines(count, started), None, 0, list[str]()
        dead = [] if started else range(count)
        starting = {} if started else {rank: lambda rank=rank: self.engines.start([rank]) for rank in range(count)}

        def make_queue(on_loss, restore, on_worker_loss):
            return RequestQueue(self.engines.replicas, 64, on_loss, restore, dead)  # pyrefly: ignore

        self.mismatch, budget = SimpleNamespace(settings="fast"), RestartBudget(restarts, lambda: self.step)
        own = self.engines, self.engines, self.engines.start, self.mismatch, budget, make_queue
        rules = EngineRules(least, at_once=True, requested=lambda: self.wanted)
        self.recovery = RecoveringGeneration(*own, policy_waits, self.said.append, rules, starting)  # pyrefly: ignore
        self.queue, self.refit, self.admit = self.recovery.queue, self.recovery.refit, self.recovery.admit

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.engines.processes[rank].is_dead = True

    @property
    def working(self) -> list[int]:
        """The engines that have sampled."""
        return [rank for rank, process in enumerate(self.engines.processes) if process.sampled]


@contextmanager
def source_of(fleet: Fleet, kind: str) -> Iterator[RolloutSource]:
    own = sampler(fleet, prompts=4, samples=4, continues=True)
    staleness = Staleness(1, in_flight=kind == "in flight")
    if kind == "on policy":
        source = OnPolicy(own, fleet)
    else:
        source = AsyncRolloutSource(own, fleet, staleness, 0, STEPS, [], 60.0)
    try:
        source.publish(0)
        yield source
    finally:
        source.close()


def contents(rollout) -> list:
    """All that training sees, in order."""
    return [(one.tokens, turn.logprobs.tolist(), one.reward) for one in rollout.episodes for _, turn in one.turns]


def train(fleet: Fleet, kind: str, during: dict[int, Callable[[], None]] | None = None, steps: int = STEPS) -> list:
    """Run the steps; do `during` half a rollout after a step has begun."""
    found = []
    with source_of(fleet, kind) as source:
        for step in range(1, steps + 1):
            if isinstance(fleet, Elastic):
                fleet.step = step
            event = (during or {}).get(step)
            timer = threading.Timer(0.08, event) if event else None
            if timer:
                timer.start()
            found.append(source.take(step, lambda _: None))
            if timer:
                timer.join()
            source.finish_generation()
            source.wait_until_idle(lambda _: None)
            source.publish(step)
    return found


KINDS = ["on policy", "one step off", "in flight"]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(collector, "_LOOK_S", 0.01)
    monkeypatch.setattr(background, "_LOOK_S", 0.01)


@pytest.fixture(scope="module")
def undisturbed() -> list:
    return train(Fleet(), "on policy")


def same(found: list, expected: list) -> bool:
    """Whether no response is lost or there twice, and each is as without disturbance."""
    return [asked(own) for own in found] == [asked(own) for own in expected] and (
        list(map(contents, found)) == list(map(contents, expected))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_responses_are_the_same_whichever_engines_are_lost_ended_and_started(undisturbed, kind):
    fleet = Elastic(4, least=1, policy_waits=kind == "on policy")

    def want(count: int) -> Callable[[], None]:
        return lambda: setattr(fleet, "wanted", count)

    events = {1: lambda: fleet.kill(1), 2: want(2), 3: lambda: fleet.kill(0), 4: want(4), 5: lambda: fleet.kill(0, 3)}
    found = train(fleet, kind, events)
    assert same(found, undisturbed), fleet.said
    if kind == "on policy":
        assert [versions(rollout) for rollout in found] == [{step} for step in range(STEPS)]
    said = " ".join(fleet.said)
    assert "requested number of engines: 2 (2 end, 0 start)" in said
    assert "requested number of engines: 4 (0 end, 2 start)" in said


def test_a_run_starts_with_the_least_number_of_engines_and_the_others_join_the_rollout(undisturbed):
    fleet = Elastic(3, least=1, policy_waits=True, started=False)
    gates = [threading.Event() for _ in range(3)]
    fleet.engines.may_start.clear()
    fleet.recovery._starting.clear()
    starts = {rank: gates[rank] for rank in range(3)}
    fleet.recovery._starting.update({rank: _start(gate) for rank, gate in starts.items()})
    gates[2].set()
    found = train(fleet, "on policy", {1: gates[0].set}, steps=1)
    # The last one has never started.
    assert same(found, undisturbed[:1]) and fleet.working == [0, 2]
    assert fleet.engines.refits[:2] == [(2,), (0,)] and fleet.engines.refits[2:] == [(0, 2)]
    gates[1].set()


def _start(gate: threading.Event):
    from nemo_rl_lite.workers.recovery import _Start

    return _Start(lambda: gate.wait(30))


def test_an_engine_restarts_while_others_sample_and_joins_with_the_weights_of_the_rollout(undisturbed):
    fleet = Elastic(2, least=1, policy_waits=True)
    fleet.engines.may_start.clear()
    found = train(fleet, "on policy", {1: lambda: fleet.kill(0), 3: fleet.engines.may_start.set})
    assert same(found, undisturbed)
    # Two refits reach only the other engine, and the new one gets its own in the third rollout.
    assert fleet.engines.refits[:5] == [(0, 1), (1,), (1,), (0,), (0, 1)]
    assert 0 in fleet.working


def test_a_refit_waits_for_the_least_number_of_engines():
    fleet = Elastic(2, least=2, policy_waits=True)
    fleet.engines.may_start.clear()
    with source_of(fleet, "on policy") as source:
        threading.Timer(0.05, fleet.kill, (0,)).start()
        source.take(1, lambda _: None)
        threading.Timer(0.3, fleet.engines.may_start.set).start()
        source.publish(1)
        assert fleet.engines.refits == [(0, 1), (0, 1)] and fleet.engines.may_start.is_set()


def test_without_any_engine_a_rollout_waits_for_one(undisturbed):
    fleet = Elastic(2, least=1, policy_waits=True)
    found = train(fleet, "on policy", {1: lambda: fleet.kill(0, 1)}, steps=2)
    assert same(found, undisturbed[:2]) and "restart 1 of at most 3" in " ".join(fleet.said)


def test_an_engine_that_cannot_start_is_left_out_while_enough_others_live(undisturbed):
    fleet = Elastic(3, least=2, policy_waits=True, restarts=2)
    fleet.engines.broken = {0}
    found = train(fleet, "on policy", {1: lambda: fleet.kill(0)}, steps=1)
    assert same(found, undisturbed[:1]) and fleet.engines.live == [1, 2]
    assert any("the start of generation rank 0 failed" in line for line in fleet.said)
    assert "no restart is left, and the run continues without it" in fleet.said[-1]


def test_an_engine_that_cannot_start_ends_the_run_if_too_few_are_left():
    fleet = Elastic(2, least=2, policy_waits=True, restarts=2)
    fleet.engines.broken = {0}
    with pytest.raises(WorkerError, match="the process died"):
        train(fleet, "on policy", {1: lambda: fleet.kill(0)}, steps=2)


def test_responses_are_the_same_if_all_engines_restart_with_new_settings(undisturbed):
    fleet = Elastic(3, least=1, policy_waits=True)
    first = list(fleet.engines.processes)
    fleet.engines.may_start.clear()

    def change() -> None:
        # Engine 0 is still starting with the old settings.
        fleet.mismatch.settings = "plain"
        fleet.engines.may_start.set()

    found = train(fleet, "on policy", {1: lambda: fleet.kill(0), 2: change})
    assert same(found, undisturbed), fleet.said
    assert all(process.is_dead for process in first) and fleet.engines.live == [0, 1, 2]


def test_the_loss_of_the_policy_while_an_engine_joins_is_raised():
    fleet = Elastic(2, least=1, policy_waits=True)
    refit = fleet.engines.refit

    def without_policy(version, engines=None):
        if engines is not None:
            raise LOST
        return refit(version, engines)

    fleet.engines.refit = without_policy
    with pytest.raises(WorkerError) as caught:
        train(fleet, "on policy", {1: lambda: fleet.kill(0)}, steps=3)
    assert caught.value is LOST
