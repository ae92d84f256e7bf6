"""Weights that an engine shares, with files as the memory that two processes share."""

import pytest
import torch
from torch import Tensor, nn

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.ipc import SharedFrozenParams, share_weights
from tests.unit.refit.transport.files import Files


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.clone(), requires_grad=False)


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def test_equal_weights_move_to_the_engine_and_others_stay(files):
    matrix, norm, vocabulary = torch.randn(6, 80), torch.ones(16), torch.randn(10, 16)
    # Two of the engine's weights lie in one allocation, and its vocabulary is padded.
    both = files.new("both", torch.cat([matrix.flatten(), norm]), offset=512)
    padded = files.new("vocabulary", torch.cat([vocabulary, torch.zeros(2, 16)]))
    weights = share_weights([both[:480].view(6, 80), both[480:], padded, torch.tensor(3.0)], files)
    same = [frozen(matrix), frozen(norm), frozen(norm), frozen(vocabulary)]
    last_row_differs = matrix.clone()
    last_row_differs[5, 79] += 1
    # The order of rows, the shape, the dtype, a longer vocabulary; the last one is trained.
    unlike = [frozen(last_row_differs), frozen(matrix.flip(0)), frozen(matrix.view(12, 40)), frozen(norm.double())]
    unlike += [frozen(torch.cat([vocabulary, torch.zeros(3, 16)])), nn.Parameter(norm.clone())]
    values, places = [one.clone() for one in (*same, *unlike)], [one.data_ptr() for one in unlike]
    in_engine = SharedFrozenParams(files)
    frozen_bytes = in_engine.take(weights, [*same, *unlike])
    assert frozen_bytes.shared == 4 * (480 + 16 + 16 + 160) and frozen_bytes.twice == 4 * (3 * 480 + 2 * 16 + 13 * 16)
    assert all(one in in_engine for one in same) and not any(one in in_engine for one in unlike)
    assert [one.data_ptr() for one in unlike] == places
    assert all(map(torch.equal, (*same, *unlike), values))
    # What they read now is the engine's memory.
    both[0], padded[9, 15] = 7, 8
    assert same[0][0, 0] == 7 and same[3][9, 15] == 8
    assert files.now_open == 2


def test_memory_that_changes_is_noticed(files):
    weight = files.new("weight", torch.randn(4, 8))
    in_engine = SharedFrozenParams(files)
    in_engine.check()
    in_engine.take(share_weights([weight], files), [frozen(weight)])
    in_engine.check()
    weight[3, 7] = 0
    with pytest.raises(RefitError, match="weights that an engine shares with the policy have changed"):
        in_engine.check()


def refuse(asked):
    raise RefitError("no such process")
