"""What is asked of a model before CUDA graphs record it, and what attention without dropout leaves alone."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from torch import nn

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.policy.megatron.recordable import accumulate_where_recorded, check_recordable, leave_random_state


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.attention_dropout, self.attention_dropout_ctx = dropout, self.fork

    def fork(self):
        raise AssertionError("the random state was touched")


def chunk(**config: object) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(**config))


@pytest.mark.parametrize("shares", [(0.1, 0.0), (0.0, 0.2)])
def test_a_model_with_dropout_is_refused(shares):
    hidden, attention = shares
    check_recordable([chunk(hidden_dropout=0.0, attention_dropout=0.0)])
    with pytest.raises(TrainingError, match=f"dropout \\({max(shares)}\\).*cuda_graph_impl=none"):
        check_recordable([chunk(hidden_dropout=hidden, attention_dropout=attention)])


@pytest.mark.parametrize("kind", [float, nn.Dropout])
def test_attention_touches_the_random_state_where_it_has_dropout(kind):
    without, with_dropout = Attention(kind(0.0)), Attention(kind(0.1))
    leave_random_state([nn.Sequential(without, nn.Linear(2, 2), with_dropout)])
    assert without.attention_dropout_ctx is nullcontext
    assert with_dropout.attention_dropout_ctx == with_dropout.fork


def test_megatron_core_wraps_the_model_on_the_stream_of_graphs():
    (own,) = accumulate_where_recorded([chunk(cuda_graph_impl="none")])
    assert own.config.cuda_graph_impl == "full_iteration"
