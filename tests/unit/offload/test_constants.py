"""Weights that never change: they leave and come back in place, and are copied to the host once."""

import torch

from nemo_rl_lite.offload.host_memory import HostArena
from nemo_rl_lite.offload.mover import FrozenWeights


def make() -> tuple[list[torch.Tensor], torch.Tensor, FrozenWeights]:
    tensors = [torch.arange(1000.0), torch.arange(7), torch.full((3, 5), 2.0)]
    view = tensors[0][10:20]
    return tensors, view, FrozenWeights("weights", lambda: tensors, HostArena("tests", None), torch.device("cpu"))


def test_contents_and_views_survive():
    tensors, view, own = make()
    expected = [one.clone() for one in tensors]
    whole = own.device_bytes()
    assert whole == sum(one.untyped_storage().nbytes() for one in tensors)
    for _ in range(2):
        own.leave()
        assert own.device_bytes() == 0 and all(one.untyped_storage().nbytes() == 0 for one in tensors)
        own.come_back()
        assert own.device_bytes() == whole and view.tolist() == list(range(10, 20))
        assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))


def test_they_are_copied_to_the_host_once():
    _, _, own = make()
    for _ in range(3):
        own.leave()
        own.leave()
        own.come_back()
        own.come_back()
    moves = own.take_moves()
    assert [name for name, _ in moves] == ["weights/to_host", *["weights/to_device"] * 3]
    assert {move.nbytes for _, move in moves} == {own.device_bytes()} and own.take_moves() == []
