import pytest
import torch

from nemo_rl_lite.offload.phases import GradientBuffers


def test_dropped_gradients_come_back_as_zeros_under_the_same_views():
    buffer = torch.ones(100)
    view = buffer[20:30]
    gradients = GradientBuffers([buffer])
    for _ in range(2):
        gradients.drop()
        assert gradients.device_bytes() == 0
    for _ in range(2):
        gradients.bring_back()
        assert gradients.device_bytes() == 400
    assert torch.equal(view, torch.zeros(10))
    view += 1
    assert buffer.sum() == 10
    gradients.bring_back()
    assert buffer.sum() == 10


def test_gradients_are_never_dropped_while_they_accumulate():
    buffer = torch.ones(4)
    gradients = GradientBuffers([buffer])
    with gradients.accumulating(), pytest.raises(RuntimeError, match="being accumulated"):
        gradients.drop()
    assert torch.equal(buffer, torch.ones(4))
    gradients.drop()


def test_an_accumulation_ends_also_with_an_error():
    gradients = GradientBuffers([torch.ones(4)])
    with pytest.raises(ZeroDivisionError), gradients.accumulating():
        raise ZeroDivisionError
    gradients.drop()


def test_dropped_gradients_cannot_accumulate():
    gradients = GradientBuffers([torch.ones(4)])
    gradients.drop()
    with pytest.raises(RuntimeError, match="prepare_for_training"), gradients.accumulating():
        pass
