"""What a model must have so that logprobs can be computed of it."""

import pytest

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.policy.megatron.scores import check_scorable


class HybridModel:
    def forward(self, input_ids, position_ids):
        raise AssertionError("not called")


def test_a_model_without_the_hook_is_refused_by_name():
    with pytest.raises(TrainingError, match="megatron-core's HybridModel has no output_processor"):
        check_scorable(HybridModel())
