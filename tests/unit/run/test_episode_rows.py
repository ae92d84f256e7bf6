"""Episodes with several rows, from records in rollout workers to the replicas of a policy, without processes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_rl_lite.losses.batch import OF_TOKENS, TokenRows
from nemo_rl_lite.losses.interface import count_masked
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.rollout.episode import EpisodeRecord
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.workers import policy as policy_module
from nemo_rl_lite.workers import rollout_worker as worker_module
from nemo_rl_lite.workers import rollouts as rollouts_module
from nemo_rl_lite.workers.policy import RemotePolicy
from nemo_rl_lite.workers.rollout_worker import RolloutWorker
from nemo_rl_lite.workers.rollouts import RolloutWorkers
from tests.unit.rollout.histories import wandered
from tests.unit.run.test_remote_policy import Group

# An advantage tells an episode.
EPISODES, STEPS, ADVANTAGES = 8, 2, [0.25 * place for place in range(1, 9)]


class Keeper(RolloutWorker):
    """A rollout worker that only keeps episodes."""

    def __init__(self, episodes):
        self._episodes = dict(enumerate(episodes))


class Keepers(RolloutWorkers):
    """Rollout workers in this process."""

    def __init__(self, workers):
        self._workers = workers
        self._members = [SimpleNamespace(rank=rank, first=0, done={}) for rank in range(len(workers))]

    def _call(self, member, method, *arguments):
        return [getattr(self._workers[member.rank], method)(*arguments)]


class Ranks(Group):
    """Ranks that keep rows, and the arguments of `join_episodes`."""

    def call_each(self, method, arguments, phase=""):
        if method == "put_parts":
            each = [(TokenRows.concatenated(parts).select(order), name) for name, order, _, *parts in arguments]
            return super().call_each("put_batch", each)
        if method == "join_episodes":
            for worker, (tokens, fillers, name) in zip(self.workers, arguments, strict=True):
                worker.told = tokens.tolist(), fillers, name
            return [None] * len(self.workers)
        return super().call_each(method, arguments, phase)


@pytest.fixture(autouse=True)
def results_are_there(monkeypatch):
    monkeypatch.setattr(policy_module, "wait", lambda call: call)
    monkeypatch.setattr(rollouts_module, "wait", lambda *calls: [one for call in calls for one in call])
    monkeypatch.setattr(worker_module.ray, "put", lambda value: value)


@pytest.fixture(scope="module")
def episodes():
    found = [wandered(seed, steps=3, version=seed % 2)[0] for seed in range(EPISODES)]
    # One without a reward, and one that is left out.
    found[2].reward, found[5].is_left_out = None, True
    return found


def here(episodes, advantages=ADVANTAGES) -> TokenRows:
    rows = Rollout(episodes, 1, 0).rows(advantages, 3)
    assert isinstance(rows, TokenRows)
    return rows


def elsewhere(episodes, advantages=ADVANTAGES):
    """The rows of records: the first five episodes are in one worker, the others in another."""
    records = [EpisodeRecord.of(one, place // 5, place % 5) for place, one in enumerate(episodes)]
    store = Keepers([Keeper(episodes[:5]), Keeper(episodes[5:])])
    return Rollout(records, 1, 0, store=store).rows(advantages, 3)


@pytest.mark.parametrize("by_turn", [False, True])
def test_counted_rows_are_the_rows_of_the_episodes(episodes, by_turn):
    of_turns = [np.arange(1.0, one.turn_count + 1) for one in episodes]
    counted, rows = (made(episodes, of_turns if by_turn else ADVANTAGES) for made in (elsewhere, here))
    assert (rows.token_advantages is not None) == by_turn
    for name in (*OF_TOKENS, "lengths", "advantages", "rewards", "episodes"):
        assert np.array_equal(getattr(counted.fetched, name), getattr(rows, name)), name
    for name in ("lengths", "rewards", "trained", "episodes"):
        assert np.array_equal(getattr(counted, name), getattr(rows, name)), name
    for own in (slice(None), slice(7), slice(4, 20)):
        assert count_masked(counted[own]) == count_masked(rows[own])


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("made", [here, elsewhere])
def test_each_row_is_in_the_optimizer_step_of_its_episode(episodes, made, replicas):
    group, rows = Ranks(replicas, tensor=1), here(episodes)
    remote = RemotePolicy(group, EPISODES // STEPS)  # pyrefly: ignore
    batch = remote.put_batch(made(episodes))
    expected = [[], []]
    for row, number in zip(rows, rows.episodes, strict=True):
        expected[number // (EPISODES // STEPS)].append(row.tokens.tolist())
    sizes = [[len(own) for own in of_step] for of_step in batch.shares]
    trained = {own: rows.trained[rows.advantages == own].sum() for own in set(rows.advantages)}
    found, missing = [[], []], 0
    for replica, worker in enumerate(group.workers):
        held, (tokens, fillers, _) = worker.held["train"], worker.told
        assert len(held) == len(tokens) == sum(of_step[replica] for of_step in sizes)
        missing += len(fillers)
        for index, row in enumerate(held):
            if index not in fillers:
                found[index >= sizes[0][replica]].append(row.tokens.tolist())
                assert tokens[index] == trained[row.advantage]
    assert [sorted(own) for own in found] == [sorted(own) for own in expected]
    assert missing == 0
    remote.train(batch, SFTLoss())
    firsts = [[len(own) for own, _ in worker.steps] for worker in group.workers]
    assert firsts == [[*of_replica] for of_replica in zip(*sizes, strict=True)]
    assert [counts for _, counts in group.workers[0].steps] == [
        count_masked(rows[: len(expected[0])]).tokens,
        count_masked(rows[len(expected[0]) :]).tokens,
    ]


def test_the_rows_after_the_first_step_are_scored_and_counted(episodes):
    flops = SimpleNamespace(forward=lambda tokens: tokens, reference=float, training=lambda tokens: 0)
    group, rows = Ranks(2, tensor=1), here(episodes)
    remote = RemotePolicy(group, EPISODES // STEPS, flops=flops)  # pyrefly: ignore
    batch = remote.put_batch(rows)
    first = int((rows.episodes < EPISODES // STEPS).sum())
    assert remote.work(batch, ["later"]).scoring == rows.lengths[first:].sum()
    remote.score(batch, ["later"])
    trained = remote.train(batch, SFTLoss())
    # Both replicas compare the first step's rows in training, and the others before.
    assert trained["rows"] == sum(len(worker.held["train"]) for worker in group.workers)


def test_without_several_rows_ranks_are_told_of_no_episodes(episodes):
    group = Ranks(2, tensor=1)
    remote = RemotePolicy(group, 4)  # pyrefly: ignore
    remote.put_batch(replace(here(episodes).select(range(8)), episodes=None))
    assert not any(hasattr(worker, "told") for worker in group.workers)
