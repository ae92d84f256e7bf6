"""Which replica of a teacher scores which rows, and where its scores end up, without processes."""

import numpy as np
import pytest

from nemo_rl_lite.cluster.calls import Call
from nemo_rl_lite.losses.batch import Batch, CountedRows, SharedRows, TokenRow, TokenRows
from nemo_rl_lite.policy.interface import ParallelPlace, TeacherScores, with_scores
from nemo_rl_lite.policy.teacher import TeacherWorker
from nemo_rl_lite.workers import policy as policy_module
from nemo_rl_lite.workers.policy import RemoteTeacher

LOW, HIGH = "low", "high"
TEACHERS = {LOW: 0, HIGH: 1}
ROWS = TokenRows.of([TokenRow(list(range(10 * row, 10 * row + 1 + row)), [True] * (row + 1)) for row in range(5)])


class Worker:
    """One rank: a token's logprob is minus the token, and its two largest logits are of the tokens after it. The second
    teacher's logprobs are lower by 1000."""

    def __init__(self, data_rank: int, replicas: int, reports: bool, topk: bool):
        self.own = ParallelPlace(data_rank, replicas, 0 if reports else 1, True, False)
        self.calls, self.rows, self.topk, self._scored = [], 0, topk, {}

    def place(self):
        return self.own

    def prepare_for_logprob(self, teacher):
        self.calls.append(("prepare_for_logprob", teacher))

    def leave(self):
        self.calls.append("leave")

    def score(self, rows, teacher):
        self.calls.append(("score", teacher))
        self.rows = len(rows)
        if not self.own.reports:
            return None
        tokens = rows.tokens
        ids = np.stack([tokens + 1, tokens + 2], axis=1).astype(np.int32)
        return TeacherScores(
            -tokens.astype(np.float32) - 1000 * teacher, *((ids * 0.5, ids) if self.topk else (None, None))
        )

    score_parts, scores = TeacherWorker.score_parts, TeacherWorker.scores

    def pop_memory(self):
        other = {"measured/logprob/activations": 9.0}
        return {"measured/logprob/teacher_weights": 5.0 + self.own.data_rank} | other


class Group:
    def __init__(self, replicas: int, topk: bool):
        ranks = [(data, reports) for data in range(replicas) for reports in (True, False)]
        self.workers = [Worker(data, replicas, reports, topk) for data, reports in ranks]

    def put(self, value):
        return value

    def call(self, method, *arguments, phase=""):
        return [getattr(worker, method)(*arguments) for worker in self.workers]

    def call_one(self, place, methods, phase):
        return Call((), phase, tuple(getattr(self.workers[place], method)(*own) for method, own in methods))

    def call_each(self, method, arguments, phase=""):
        return [getattr(worker, method)(*own) for worker, own in zip(self.workers, arguments, strict=True)]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    def results(*calls):
        return [one for call in calls for one in (call.references if isinstance(call, Call) else call)]

    monkeypatch.setattr(policy_module, "wait", results)
    monkeypatch.setattr(policy_module.ray, "get", lambda references: references)


def teachers(group: Group, cost=float) -> RemoteTeacher:
    return RemoteTeacher(group, TEACHERS, [cost, cost])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_scores_are_where_their_tokens_are(replicas):
    group = Group(replicas, topk=True)
    scored = teachers(group).scored(ROWS, [LOW] * 5)
    assert (scored.teacher_logprobs == -ROWS.tokens).all() and (scored.tokens == ROWS.tokens).all()
    assert (scored.teacher_topk_ids[:, 1] == ROWS.tokens + 2).all()
    # A replica's ranks score the same rows.
    first, second = ([worker.rows for worker in group.workers[rank::2]] for rank in (0, 1))
    assert first == second and sum(first) == len(ROWS)
    assert all(worker.calls == [("prepare_for_logprob", 0), ("score", 0), "leave"] for worker in group.workers)
    batch = Batch.padded(scored.select([3, 1]))
    assert batch.teacher_logprobs.tolist() == [[-30, -31, -32, -33], [-10, -11, 0, 0]]
    assert batch.teacher_topk_ids.shape == (2, 4, 2) and batch.teacher_topk_ids[1, 1].tolist() == [12, 13]
    assert batch.teacher_topk_logits[0, 0].tolist() == [15.5, 16.0]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_source_is_scored_by_its_teacher_alone(replicas):
    group, sources = Group(replicas, topk=True), [HIGH, LOW, LOW, HIGH, LOW]
    scored = teachers(group).scored(ROWS, sources)
    for row, source in zip(scored, sources, strict=True):
        assert (row.teacher_logprobs == -row.tokens - 1000 * TEACHERS[source]).all()
        assert (row.teacher_topk_ids[:, 0] == row.tokens + 1).all()
    turns = [call for one in TEACHERS.values() for call in (("prepare_for_logprob", one), ("score", one), "leave")]
    assert all(worker.calls == turns for worker in group.workers)


class Elsewhere:
    """A source that gives one part for each row, in reverse."""

    def share(self, shares):
        whole = [self.fetch(rows[::-1]) for rows, _ in shares]
        return [
            SharedRows(tuple(rows[place : place + 1] for place in range(len(rows))), tuple(range(len(rows)))[::-1])
            for rows in whole
        ]

    def fetch(self, index):
        return ROWS.select(index)

    def apply(self, function, index):
        return function(ROWS.select(index))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_scores_of_rows_elsewhere_stay_with_the_teacher(replicas):
    sources = [LOW, HIGH, HIGH, LOW]
    counted = CountedRows(Elsewhere(), np.array([4, 2, 0, 1]), ROWS.lengths[[4, 2, 0, 1]], np.zeros(4), [{}] * 4)
    scored = teachers(Group(replicas, topk=True)).scored(counted, sources)
    lower = {place: 1000 * TEACHERS[source] for place, source in zip(counted.places.tolist(), sources, strict=True)}

    def expected(places, rows):
        return np.concatenate([-row.tokens - lower[place] for place, row in zip(places, rows, strict=True)])

    assert isinstance(scored, CountedRows)
    for index in ([0, 1, 2, 3], [3, 0]):
        (share,) = scored.share([(index, ())])
        rows = TokenRows.concatenated(share.parts).select(share.order)
        whole = with_scores(rows, share.scored, share.scores)
        assert (whole.tokens == ROWS.select(counted.places[index]).tokens).all()
        assert (whole.teacher_logprobs == expected(counted.places[index], whole)).all()
        assert (whole.teacher_topk_ids[:, 0] == whole.tokens + 1).all()
    assert (scored.fetched.teacher_logprobs == expected(counted.places, scored.fetched)).all()
    found = scored[1:].apply(lambda rows: [row.teacher_logprobs[0] for row in rows])
    assert found == [-row.tokens[0] - lower[place] for place, row in zip(counted.places[1:], scored[1:], strict=True)]


def test_without_largest_logits_there_are_none():
    scored = teachers(Group(2, topk=False)).scored(ROWS, [LOW] * 5)
    assert scored.teacher_topk_ids is None and Batch.padded(scored).teacher_topk_logits is None
    assert scored[2].teacher_logprobs.tolist() == [-20, -21, -22] and ROWS.teacher_logprobs is None


def test_long_rows_are_shared_by_their_work():
    group = Group(2, topk=False)
    seen = []
    for worker in group.workers:
        worker.score = lambda rows, teacher, own=worker: (
            seen.append(rows.lengths.tolist()) or Worker.score(own, rows, teacher)
        )
    teachers(group, cost=lambda tokens: tokens**3).scored(ROWS.select([4, 3, 0, 1]), [LOW] * 4)
    assert sorted(map(sorted, seen[::2])) == [[1, 2, 4], [5]]


def test_memory_is_that_of_the_weights():
    assert teachers(Group(2, topk=False)).pop_memory() == {"measured/logprob/teacher_weights": 6.0}
