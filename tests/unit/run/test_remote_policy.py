"""What goes to which replica, without processes."""

import pickle
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemo_rl_lite.losses.batch import Batch, TokenRow, TokenRows
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.policy.interface import SAVED_WORK, ParallelPlace, Work
from nemo_rl_lite.policy.score_files import ScoreFile
from nemo_rl_lite.workers import policy as policy_module
from nemo_rl_lite.workers.policy import RemotePolicy


class Worker:
    """One rank: keeps what it is given, and gives every token the logprob -0.5."""

    def __init__(self, data_rank, data_size, tensor_rank, context_rank, shares_prompts):
        self.own = ParallelPlace(
            data_rank, data_size, tensor_rank, True, True, context_rank, shares_prompts=shares_prompts
        )
        self.held, self.steps, self.written, self.saved = {}, [], [], {}

    def place(self):
        return self.own

    def put_batch(self, rows, name):
        self.held[name] = rows

    def score(self, which, counts, name, first):
        if not self.own.reports:
            return None
        return {"tokens": counts.tokens, "rows": len(self.held[name][first:])} if "previous" in which else {}

    def evaluate(self, rows, loss, counts, name):
        batch = Batch.padded(self.held[name][:rows]) if rows else None
        if batch is None or not self.own.reports:
            return None
        return {name: one.item() for name, one in loss(torch.full(batch.tokens.shape, -0.5), batch, counts)[1].items()}

    def train(self, loss, counts, rows, name, mismatch_counts):
        mismatch = {} if mismatch_counts is None else {"tokens": mismatch_counts.tokens, "rows": rows.stop - rows.start}
        self.steps.append(([row.tokens[0] for row in self.held[name][rows]], counts.tokens))
        return {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "wd": 0.0, "skipped_steps": 0.0} | self.saved, mismatch

    def write_scores(self, places, target, loss, name):
        if self.own.reports:
            assert [row.tokens[0] for row in self.held[name]] == places[0].tolist() and not places[1].any()
            self.written.append((target, places[0].tolist()))

    def scores_written(self):
        return [f"full on {self.own.data_rank}"] if self.written else []

    def logprobs(self, tokens_BT, lengths_B, phase):
        return tokens_BT.float().numpy()


class Group:
    """The workers of a policy, called one after the other; `stored` has what was put."""

    def __init__(self, replicas, tensor=2, context=1, shares_prompts=False):
        places = product(range(replicas), range(context), range(tensor))
        self.workers = [Worker(data, replicas, rank, part, shares_prompts) for data, part, rank in places]
        self.stored = []

    def put(self, value):
        self.stored.append(value)
        return value

    def call(self, method, *arguments, phase=""):
        return self.call_each(method, [arguments] * len(self.workers), phase)

    def call_each(self, method, arguments, phase=""):
        return [getattr(worker, method)(*own) for worker, own in zip(self.workers, arguments, strict=True)]


@pytest.fixture(autouse=True)
def results_are_there(monkeypatch):
    monkeypatch.setattr(policy_module, "wait", lambda call: call)


def rows(*lengths: int, prompt: int = 0) -> list[TokenRow]:
    """The first token of each is its index."""
    return [
        TokenRow([index] + [7] * (length - 1), [place >= prompt for place in range(length)])
        for index, length in enumerate(lengths)
    ]


def policy(replicas: int, global_batch: int, together: int = 1) -> tuple[RemotePolicy, Group]:
    group = Group(replicas)
    return RemotePolicy(group, global_batch, together), group  # pyrefly: ignore


def test_replicas_tell_of_their_passes_and_one_alone_has_nobody_to_wait_for():
    remote, group = policy(replicas=2, global_batch=4)
    for worker in group.workers:
        # Ranks that do not report are not counted.
        seconds = 2.0 + 2 * worker.own.data_rank if worker.own.reports else 100.0
        worker.take_passes = lambda seconds=seconds: {"train": [seconds]}
    remote.train(remote.put_batch(rows(6, 6, 6, 6)), SFTLoss())
    assert remote.take_waits() == {"train": 4.0, "idle_share/train": 0.25, "slowdown/train": 2.0}
    assert policy(replicas=1, global_batch=4)[0].take_waits() == {}


def test_context_ranks_may_wait_for_each_other():
    group = Group(replicas=2, context=2)
    remote = RemotePolicy(group, 4, 1)  # pyrefly: ignore
    for worker in group.workers:
        seconds = {"logprob": [4.0 if (worker.own.data_rank, worker.own.context_rank) == (1, 1) else 2.0]}
        worker.take_passes = lambda seconds=seconds: seconds
    assert remote.take_waits() == {"logprob": 4.0, "idle_share/logprob": 1 - 10 / 16}


@pytest.mark.parametrize(("steps", "slow", "named"), [(5, 6.0, 1), (9, 6.0, 1), (4, 6.0, 0), (9, 4.5, 0)])
def test_a_replica_that_is_slow_for_its_work_in_step_after_step_is_named(caplog, steps, slow, named):
    """The third has half of the work in half of the time; the second is slow, or not slow enough."""
    remote, group = policy(replicas=3, global_batch=6)
    group.name = "policy"
    group.addresses = lambda timeout_s: [(f"10.0.0.{rank}", 1) for rank in range(6)]
    group.gpus = lambda timeout_s: [[str(rank)] for rank in range(6)]
    for worker in group.workers:
        seconds = (4.0, slow, 2.0)[worker.own.data_rank]
        worker.take_passes = lambda seconds=seconds: {"train": [seconds / 2, seconds / 2]}
    remote._trained = [8.0, 8.0, 4.0]
    for _ in range(steps):
        assert remote.take_waits()["slowdown/train"] == pytest.approx(slow / 4)
    assert len(caplog.messages) == named
    where = "policy replica 1: rank 2 on 10.0.0.2 (GPU 2); rank 3 on 10.0.0.3 (GPU 3) took 50 % longer"
    assert all(where in message for message in caplog.messages)


@pytest.mark.parametrize(("episodes", "work"), [(None, [10, 8]), ([0, 1, 2], [10, 1 + 4])])
def test_the_work_of_a_replica_includes_the_rows_that_fill_it_up(monkeypatch, episodes, work):
    remote, group = policy(replicas=2, global_batch=4)
    monkeypatch.setattr(remote, "_split", lambda rows: [[[0, 1], [2, 3]]])
    for worker in group.workers:
        worker.join_episodes = lambda *_: None
    batch = TokenRows.of(rows(4, 6, 4))
    remote.put_batch(batch if episodes is None else replace(batch, episodes=np.array(episodes)))
    assert remote._work["train"] == work


@pytest.mark.parametrize(
    ("which", "forward", "reference"),
    [(["previous", "reference"], 3 + 4 + 5 + 6, 3 + 4 + 5 + 6), (["later"], 5 + 6, 0), ([], 0, 0)],
)
def test_the_work_on_a_batch_is_counted_by_its_real_lengths(which, forward, reference):
    """Of two optimizer steps; in the first, `later` needs no pass. A token is 1 FLOP forward, 10 for the reference and
    100 in training."""
    flops = SimpleNamespace(
        forward=lambda tokens: tokens, reference=lambda tokens: 10 * tokens, training=lambda tokens: 100 * tokens
    )
    remote = RemotePolicy(Group(2), 2, flops=flops)  # pyrefly: ignore
    work = remote.work(remote.put_batch(rows(3, 4, 5, 6)), which)
    assert work == Work(forward + 10 * reference, 100 * 18)
    unknown, _ = policy(replicas=1, global_batch=2)
    assert unknown.work(unknown.put_batch(rows(3, 4)), which) is None


def test_a_long_row_is_sent_to_its_replica_alone_and_once():
    remote, group = policy(replicas=4, global_batch=64)
    remote.put_batch(rows(*[16] * 63, 4096))
    sizes = [len(pickle.dumps(shard)) for shard in group.stored]
    assert len(sizes) == 4, "once a replica, not once a rank"
    assert max(sizes[1:]) < 4_000 and sizes[0] < 50_000
    widths = [Batch.padded(worker.held["train"]).tokens.shape for worker in group.workers]
    assert widths == [(1, 4096)] * 2 + [(21, 16)] * 6


def test_a_pipeline_stage_gets_the_experts_of_its_layers_once():
    group = Group(2)
    for index, worker in enumerate(group.workers):
        worker.own = replace(worker.own, replayed_layers=((1, 2), (3,))[index % 2])
    remote = RemotePolicy(group, 4)  # pyrefly: ignore
    chosen = np.arange(4 * 3 * 4 * 2, dtype=np.uint8).reshape(4, 3, 4, 2)
    remote.put_batch([replace(row, routed_experts=own) for row, own in zip(rows(*[4] * 4), chosen, strict=True)])
    assert len(group.stored) == 4, "one for each replica and stage"
    for worker in group.workers:
        held = worker.held["train"]
        expected = chosen[[row.tokens[0] for row in held]][:, :, list(worker.own.replayed_layers)]
        assert np.array_equal(held.routed_experts.values, np.concatenate(expected))


def test_each_optimizer_step_is_split_over_the_replicas():
    remote, group = policy(replicas=2, global_batch=4)
    metrics = remote.train(remote.put_batch(rows(*[3] * 8)), SFTLoss())
    first, second = group.workers[0], group.workers[2]
    assert first.steps == [([0, 2], 12.0), ([4, 6], 12.0)] and second.steps == [([1, 3], 12.0), ([5, 7], 12.0)]
    # Shares add up over the replicas; averages are over the steps.
    assert metrics == {"loss": 2.0, "grad_norm": 2.0, "lr": 0.1, "wd": 0.0, "skipped_steps": 0.0}


def test_each_pass_over_a_batch_takes_the_same_steps():
    group = Group(2)
    remote = RemotePolicy(group, 4, iterations=3, flops=SimpleNamespace(forward=float, training=float))  # pyrefly: ignore
    batch = remote.put_batch(rows(*[3] * 8))
    assert remote.train(batch, SFTLoss())["loss"] == 2.0
    assert group.workers[0].steps == 3 * [([0, 2], 12.0), ([4, 6], 12.0)]
    assert remote.work(batch, []) == Work(0, 3 * 8 * 3)


def test_pairs_stay_together_where_shares_are_balanced():
    remote, group = policy(replicas=2, global_batch=8, together=2)
    remote.put_batch(rows(9, 9, 8, 8, 1, 1, 2, 2))
    held = [[row.tokens[0] for row in worker.held["train"]] for worker in group.workers[::2]]
    assert held == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("siblings", "expected"), [(4, [[0, 1, 2, 3], [4, 5, 6, 7]]), (8, [[0, 1, 2, 3], [4, 5, 6, 7]])]
)
def test_responses_to_a_prompt_stay_on_a_replica(siblings, expected):
    """A group that is larger than a replica's share is in parts of neighbours."""
    group = Group(2, shares_prompts=True)
    RemotePolicy(group, 8, siblings=siblings).put_batch(rows(9, 9, 8, 8, 1, 1, 2, 2, prompt=1))
    assert [[row.tokens[0] for row in worker.held["train"]] for worker in group.workers[::2]] == expected


def test_replicas_are_balanced_by_work_with_shared_prompts():
    """Groups cost 14, 19, 15 and 11 tokens; without sharing 24, 20, 16 and 12."""
    group = Group(2, shares_prompts=True)
    remote = RemotePolicy(group, 8, siblings=2)
    for worker in group.workers:
        worker.saved = {SAVED_WORK: 11.0} if worker.own.data_rank else {SAVED_WORK: 2.0}
    one, same = ([place >= prompt for place in range(length)] for length, prompt in ((12, 10), (10, 1)))
    long_prompts = [TokenRow([index] + [7] * 11, one) for index in range(2)]
    others = [TokenRow([2 + index] + [7] * 9, same) for index in range(2)]
    batch = remote.put_batch([*long_prompts, *others, *rows(*[8] * 2, *[6] * 2, prompt=1)])
    assert [len(worker.held["train"]) for worker in group.workers] == [4] * 4
    assert [[len(row.tokens) for row in worker.held["train"]] for worker in group.workers[::2]] == [
        [10, 10, 6, 6],
        [12, 12, 8, 8],
    ]
    remote.train(batch, SFTLoss())
    assert remote._trained == [32 - 2, 40 - 11]


@pytest.mark.parametrize(("shares", "prompt"), [(False, 1), (True, 0)])
def test_rows_are_balanced_alone_if_they_share_no_prompts(shares, prompt):
    """The model shares none, or prompts are too short."""
    group = Group(2, shares_prompts=shares)
    RemotePolicy(group, 8, siblings=4).put_batch(rows(9, 9, 8, 8, 1, 1, 2, 2, prompt=prompt))
    held = [[row.tokens[0] for row in worker.held["train"]] for worker in group.workers[::2]]
    assert held == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_shared_prompt_is_work_once():
    """Each replica saves 3 of the 12 tokens of an optimizer step."""
    group = Group(2)
    remote = RemotePolicy(group, 8, iterations=2, flops=SimpleNamespace(forward=float, training=lambda n: 3.0 * n))
    for worker in group.workers:
        worker.saved = {SAVED_WORK: 3.0}
    batch = remote.put_batch(rows(*[3] * 8))
    assert remote.work(batch, ["previous"]) == Work(24, 2 * 72)
    assert SAVED_WORK not in remote.train(batch, SFTLoss())
    assert remote.work(batch, ["previous"]) == Work(18, 2 * 54)
    group.workers[0].saved = group.workers[2].saved = {}
    assert remote.work(remote.put_batch(rows(*[3] * 8)), []) == Work(0, 2 * 72)


class Doubled(SFTLoss):
    def summarize(self, metrics):
        return {"loss": metrics["loss"], "double": 2 * metrics["loss"]}


def test_a_loss_makes_metrics_of_a_whole_optimizer_step():
    remote, _ = policy(replicas=2, global_batch=4)
    metrics = remote.train(remote.put_batch(rows(*[3] * 8)), Doubled())
    assert metrics == {"loss": 2.0, "double": 4.0, "grad_norm": 2.0, "lr": 0.1, "wd": 0.0, "skipped_steps": 0.0}
    held = remote.put_batch(rows(*[3] * 4), "validation")
    assert remote.evaluate(held, Doubled()) == pytest.approx({"loss": 0.5, "double": 1.0})


@pytest.mark.parametrize("count", [2, 6, 10, 14])
def test_held_out_pairs_of_any_number_are_evaluated_once_each(count):
    remote, group = policy(replicas=4, global_batch=8, together=2)
    held = remote.put_batch(rows(*range(2, 2 + count)), "validation")
    shards = [worker.held["validation"] for worker in group.workers[::2]]
    assert all(shards) and sum(map(len, shards)) == -(-count // 8) * 8
    pairs = [pair for shard in shards for pair in zip(shard[::2], shard[1::2], strict=True)]
    assert all(second.tokens[0] == first.tokens[0] + 1 and first.tokens[0] % 2 == 0 for first, second in pairs)
    assert remote.evaluate(held, SFTLoss()) == {"loss": pytest.approx(0.5)}


def test_a_replica_without_a_row_of_an_episode_gets_one_without_a_loss():
    remote, group = policy(replicas=2, global_batch=1)
    for worker in group.workers:
        worker.join_episodes = lambda tokens, fillers, name, worker=worker: setattr(worker, "fillers", fillers)
    remote.put_batch(replace(TokenRows.of(rows(5, 4, 3)), episodes=np.array([0, 1, 1])))
    first, second = group.workers[0], group.workers[2]
    assert [row.tokens[0] for row in first.held["train"]] == [0, 1] and first.fillers == []
    assert [row.tokens[0] for row in second.held["train"]] == [2, 2] and second.fillers == [0]


def test_replicas_have_unequal_numbers_of_rows_in_each_optimizer_step():
    """In a step, the replica with a long row has fewer; each takes its own rows of the step."""
    remote, group = policy(replicas=2, global_batch=5)
    batch = remote.put_batch(rows(*[3] * 4, 12, 12, *[3] * 4))
    remote.train(batch, SFTLoss())
    first, second = group.workers[0], group.workers[2]
    assert [taken for taken, _ in first.steps] == [[4], [5]]
    assert [taken for taken, _ in second.steps] == [[0, 1, 2, 3], [6, 7, 8, 9]]
    sampled = [replace(row, generation_logprobs=[0.0] * len(row.tokens)) for row in rows(*[3] * 4, 12, 12, *[3] * 4)]
    batch = remote.put_batch(sampled)
    remote.score(batch, ["later"])
    assert sum(own["rows"] for own in remote._mismatch["train"]) == 5, "those of the second step"


@pytest.mark.parametrize("scored", [["previous", "reference"], ["later"], ["later", "reference"], ["reference"], None])
def test_each_row_is_compared_with_the_engines_once(scored):
    """In a pass before training, or in the training pass of the first optimizer step, on all replicas together."""
    remote, _ = policy(replicas=2, global_batch=4)
    many = 4 if scored in (["reference"], None) else 8
    sampled = [replace(row, generation_logprobs=[0.0] * 3) for row in rows(*[3] * many)]
    for _ in range(2):
        batch = remote.put_batch(sampled)
        if scored:
            remote.score(batch, scored)
        trained = remote.train(batch, SFTLoss())
        parts = 4 if scored == ["later"] or scored == ["later", "reference"] else 2
        assert (trained["rows"], trained["tokens"]) == (many, parts * 3.0 * many)


def test_each_replica_writes_the_scores_of_its_rows(tmp_path):
    remote, group = policy(replicas=2, global_batch=4)
    batch, target = remote.put_batch(rows(9, 1, 3, 3, 2, 2, 7, 1)), ScoreFile(tmp_path, 1, 2, 8)
    wait = remote.write_scores(batch, SFTLoss(), target)
    each = [own for worker in group.workers for own in worker.written]
    assert [of for of, _ in each] == [target] * 2 and sorted(each[0][1] + each[1][1]) == list(range(8))
    assert wait() == ["full on 0", "full on 1"]


def test_a_new_batch_takes_the_place_of_the_old_one():
    remote, group = policy(replicas=1, global_batch=2)
    old, other = remote.put_batch(rows(1, 1)), remote.put_batch(rows(2, 2), "validation")
    remote.put_batch(rows(3, 3))
    assert all(len(worker.held) == 2 for worker in group.workers)
    remote.score(other, ["previous"])
    with pytest.raises(ValueError, match="a newer batch 'train'"):
        remote.train(old, SFTLoss())
