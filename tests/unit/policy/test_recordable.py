"""What is asked of a model before CUDA graphs record it."""

from types import SimpleNamespace

import pytest

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.policy.megatron.recordable import accumulate_where_recorded, check_recordable


def chunk(**config: object) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(**config))


@pytest.mark.parametrize("shares", [(0.1, 0.0), (0.0, 0.2)])
def test_a_model_with_dropout_is_refused(shares):
    hidden, attention = shares
    check_recordable([chunk(hidden_dropout=0.0, attention_dropout=0.0)])
    with pytest.raises(TrainingError, match=f"dropout \\({max(shares)}\\).*cuda_graph_impl=none"):
        check_recordable([chunk(hidden_dropout=hidden, attention_dropout=attention)])


def test_megatron_core_wraps_the_model_on_the_stream_of_graphs():
    (own,) = accumulate_where_recorded([chunk(cuda_graph_impl="none")])
    assert own.config.cuda_graph_impl == "full_iteration"
