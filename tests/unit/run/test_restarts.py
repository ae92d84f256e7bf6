"""Restarts of lost processes: without a limit while a run makes progress, and a few at the same step."""

from types import SimpleNamespace

import pytest

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.workers.budget import RestartBudget
from nemo_rl_lite.workers.recovery import EngineRules, RecoveringGeneration

LOSS = WorkerError("policy rank 1", "train", "the process died", lost=True)


class Run:
    """A run that may restart `most` times without a new step."""

    def __init__(self, most: int):
        self.step, self.restarts, self.budget = 0, 0, RestartBudget(most, lambda: self.step)

    def fail(self, step: int) -> None:
        self.step = step
        self.budget.take(LOSS)
        self.restarts += 1


def test_a_run_that_gets_on_restarts_as_often_as_it_must():
    run = Run(most=3)
    for step in range(15, 1000, 10):
        run.fail(step)
    assert run.restarts == 99


@pytest.mark.parametrize("again", [[15, 15, 15], [15, 12, 11], [0, 0, 0]])
def test_a_run_that_does_not_get_past_a_step_ends(again):
    run = Run(most=3)
    run.fail(15)
    for step in again[:2]:
        run.fail(step)
    with pytest.raises(WorkerError) as caught:
        run.fail(again[2])
    assert caught.value is LOSS and run.restarts == 3


def test_a_run_without_restarts_ends_at_the_first_loss():
    with pytest.raises(WorkerError):
        Run(most=0).fail(15)


@pytest.fixture
def engines():
    """Three engines, of which some are lost, in step 7 of a run that may restart once in each step."""
    here = SimpleNamespace(step=7, said=[], replaced=[], started=[], mismatch=SimpleNamespace(settings="fast"))

    def replace(ranks):
        here.replaced.append(ranks)
        return ranks

    group = SimpleNamespace(replace=replace)
    generation = SimpleNamespace(engines=3, live=[0, 1, 2], group=group, finish_generation=dict, renew=lambda ranks: 0)
    generation.only = lambda ranks: generation
    weights = SimpleNamespace(disconnect=lambda: None, refit=lambda version: {}, make_room=lambda: None)
    queue = SimpleNamespace(busy_s=0.0, replaced=lambda ranks: None)

    def make_queue(on_loss, restore, on_worker_loss):
        here.on_loss, here.on_worker_loss = on_loss, on_worker_loss
        return queue

    budget = RestartBudget(1, lambda: here.step)

    def start(group):
        here.started.append((group, here.mismatch.settings))
        if here.mismatch.settings == "too large":
            raise LOSS

    own = generation, weights, start, here.mismatch, budget, make_queue, True, here.said.append
    here.recovering = RecoveringGeneration(*own, EngineRules(3, at_once=False), {})  # pyrefly: ignore
    return here


def test_engines_that_are_lost_together_restart_once(engines):
    for rank in (0, 2):
        engines.on_loss(rank, LOSS)
    engines.recovering.refit(7)
    assert engines.replaced == [[0, 2]] and "restart 1 of at most 1" in " ".join(engines.said)


def test_engines_and_rollout_workers_share_the_restarts_of_a_step(engines):
    engines.on_loss(0, LOSS)
    engines.recovering.refit(7)
    with pytest.raises(WorkerError):
        engines.on_worker_loss(LOSS)
    with pytest.raises(WorkerError):
        engines.on_loss(1, LOSS)
    engines.step = 8
    engines.on_loss(1, LOSS)
    engines.recovering.refit(8)
    assert engines.replaced == [[0], [1]]


def test_all_engines_restart_once_after_a_change_of_their_settings(engines):
    assert "fell_back" not in engines.recovering.refit(6)
    engines.mismatch.settings = "plain"
    assert engines.recovering.refit(7)["fell_back"] == 1
    assert "fell_back" not in engines.recovering.refit(8)
    engines.on_loss(1, LOSS)
    engines.recovering.refit(9)
    assert engines.replaced == [[0], [1], [2], [1]]
    assert sorted(engines.started[:3]) == [([rank], "plain") for rank in range(3)]
    assert engines.started[3:] == [([1], "plain")]


def test_engines_that_do_not_fit_with_new_settings_let_all_workers_restart(engines):
    engines.mismatch.settings = "too large"
    with pytest.raises(WorkerError) as raised:
        engines.recovering.refit(7)
    assert raised.value.is_transient
