import pytest
import torch

from nemo_rl_lite.offload.optimizer_states import move_optimizer_states


def stepped_optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(10)
    optimizer.step()
    return optimizer


def test_states_that_are_there_already_do_not_move():
    optimizer = stepped_optimizer()
    before = [value for state in optimizer.state.values() for value in state.values()]
    assert move_optimizer_states([optimizer], "cpu").nbytes == 0
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("optimizers", [[], [stepped_optimizer()]])
def test_an_unknown_device_is_an_error_also_with_nothing_to_move(optimizers):
    with pytest.raises(ValueError, match="'disk'"):
        move_optimizer_states(optimizers, "disk")
