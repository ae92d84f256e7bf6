"""Padded buckets of sharded optimizers, in the release whose layout is known and in others."""

from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.compat import megatron, versions
from nemo_rl_lite.errors import CheckpointError


class Sharded:
    """Gathers the states of two buckets without their padding, as megatron-core 0.19 does."""

    def __init__(self, sizes: list[tuple[int, int]]):
        """`sizes`: of each bucket, with and without padding."""
        ends = [sum(size for size, _ in sizes[:count]) for count in range(len(sizes) + 1)]
        whole = torch.zeros(ends[-1])
        buckets = [
            SimpleNamespace(offset=start, numel_unpadded=unpadded, grad_data=whole[start : start + size])
            for start, (size, unpadded) in zip(ends, sizes, strict=False)
        ]
        self.buffers = [SimpleNamespace(grad_data=whole, buckets=buckets)]
        self.states = torch.arange(1.0, sum(unpadded for _, unpadded in sizes) + 1)

    def get_parameter_state_dp_zero(self):
        return {0: {torch.float32: {"exp_avg": self.states, "numel_unpadded": self.states.numel()}}}


def test_states_lie_where_their_parameters_do_within_the_block():
    part = Sharded([(4, 3), (4, 2)])
    with megatron.padded_buckets(SimpleNamespace(chained_optimizers=[part])):
        (gathered,) = part.get_parameter_state_dp_zero()[0].values()
    assert gathered["exp_avg"].tolist() == [1, 2, 3, 0, 4, 5, 0, 0]
    assert part.get_parameter_state_dp_zero()[0][torch.float32]["exp_avg"] is part.states


@pytest.mark.parametrize(("version", "sizes", "raises"), [("0.19.2", 3, False), ("0.20", 4, False), ("0.20", 3, True)])
def test_another_release_is_refused_where_a_bucket_is_padded(monkeypatch, version, sizes, raises):
    monkeypatch.setattr(versions, "version", lambda _: version)
    part = Sharded([(4, sizes)])
    if not raises:
        megatron.check_padding(part)
        return
    with pytest.raises(
        CheckpointError, match=r"megatron-core 0\.19, and 0\.20 is installed.*use_distributed_optimizer"
    ):
        megatron.check_padding(part)
