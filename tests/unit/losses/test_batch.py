"""Rows to padded batches and their parts."""

import pickle

import numpy as np
import pytest
import torch

from nemo_rl_lite.losses.batch import Batch, CountedRows, TokenRow, TokenRows
from nemo_rl_lite.losses.interface import count_masked

ROWS = [
    TokenRow([5, 6, 7], [False, True, True], [0.0, -1.0, -2.0], 0.5, [0, 2, 1]),
    TokenRow([8], [False], [0.0], -0.5, [0]),
]


def test_rows_are_padded_to_the_longest_of_them():
    batch = Batch.padded(ROWS)
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 0, 0]] and batch.lengths.tolist() == [3, 1]
    assert batch.mask.tolist() == [[0, 1, 1], [0, 0, 0]] and batch.mask.dtype == torch.float32
    assert batch.generation_logprobs.tolist() == [[0, -1, -2], [0, 0, 0]]
    assert batch.advantages.tolist() == [0.5, -0.5] and batch.previous_logprobs is None
    assert batch.ages.tolist() == [[0, 2, 1], [0, 0, 0]] and batch.ages.dtype == torch.int64
    assert Batch.padded(ROWS[1:]).tokens.shape == (1, 1)


def test_a_part_of_a_batch_is_a_part_of_all_of_its_fields():
    part = Batch.padded(ROWS).rows(torch.tensor([1, 0]), width=2)
    assert part.tokens.tolist() == [[8, 0], [5, 6]] and part.mask.tolist() == [[0, 0], [0, 1]]
    assert part.advantages.tolist() == [-0.5, 0.5] and part.lengths.tolist() == [1, 3] and part.topk_ids is None


class Elsewhere:
    """A source that calls functions, and gives no row away."""

    asked = 0

    def apply(self, function, index):
        self.asked += 1
        return function(TokenRows.of(ROWS).select(index))


@pytest.mark.parametrize(
    ("count", "reads"),
    [
        (count_masked, False),
        (len, False),
        (lambda rows: sum(int(row.tokens[-1]) for row in rows), True),
        (lambda rows: rows[0].tokens.tolist(), True),
        (lambda rows: TokenRows.of(rows).tokens.tolist(), True),
    ],
)
def test_a_function_that_reads_rows_is_called_where_they_are(count, reads):
    source = Elsewhere()
    rows = CountedRows(source, np.array([1, 0]), np.array([1, 3]), np.zeros(2), [{}, {2: 1, 1: 1}])
    assert rows.apply(count) == count(TokenRows.of(ROWS).select([1, 0]))
    assert rows[1:].apply(count) == count(TokenRows.of(ROWS[:1]))
    assert source.asked == (2 if reads else 0)


def test_rows_are_joined_selected_and_taken_apart_again():
    rows = TokenRows.of([*ROWS, TokenRow([9, 9], [True, False], [-3.0, 0.0], 1.5, [4, 0])])
    assert TokenRows.of(rows) is rows and len(rows) == 3 and rows.lengths.tolist() == [3, 1, 2]
    assert [row.tokens.tolist() for row in rows] == [[5, 6, 7], [8], [9, 9]]
    assert rows[-1].ages.tolist() == [4, 0] and rows[1].mask.tolist() == [False] and rows[0].advantage == 0.5
    for index in ([2, 0], [0, 0, 2], [1, 2], [], range(0, 3, 2)):
        part = rows.select(index)
        assert [row.tokens.tolist() for row in part] == [rows[one].tokens.tolist() for one in index]
        assert part.advantages.tolist() == [rows[one].advantage for one in index]
        assert count_masked(part) == count_masked([rows[one] for one in index])
    assert [row.tokens[0] for row in rows[::2]] == [5, 9] and np.shares_memory(rows[1:].tokens, rows.tokens)
    with pytest.raises(IndexError):
        rows[3]


def test_joined_rows_travel_and_are_padded_as_single_ones_are():
    joined = pickle.loads(pickle.dumps(TokenRows.of(ROWS)))
    for one, other in zip(vars(Batch.padded(joined)).values(), vars(Batch.padded(list(ROWS))).values(), strict=True):
        assert (one is None and other is None) or (torch.equal(one, other) and one.dtype == other.dtype)
    assert Batch.padded([TokenRow([1], [True])]).generation_logprobs is None
