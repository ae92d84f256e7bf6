"""Tensors make round trips through host memory on the CPU, by the code that also runs on a GPU, there with streams."""

import pytest
import torch

from nemo_rl_lite.errors import HostMemoryError
from nemo_rl_lite.offload import host_memory as arena_module
from nemo_rl_lite.offload import mover
from nemo_rl_lite.offload.host_memory import HostArena
from nemo_rl_lite.offload.mover import ALIGNMENT, FrozenWeights, HostCopy, Movable, Move, move_metrics

CPU = torch.device("cpu")


def offload(own: Movable) -> None:
    own.offload()
    own.synchronize()


def reload(own: Movable) -> None:
    own.reload()
    own.synchronize()


def movable(*tensors: torch.Tensor) -> Movable:
    return Movable("states", lambda: tensors, HostArena("states", None), CPU)


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    floats = torch.randn(1000, generator=generator)
    return [
        floats,
        floats[:300].to(torch.bfloat16),
        floats[:77].to(torch.float16),
        torch.arange(41),
        torch.tensor(7.0),
        torch.tensor([True, False, True]),
        torch.empty(0),
    ]


def test_every_kind_of_tensor_comes_back_bit_for_bit():
    tensors = samples()
    expected = [tensor.clone() for tensor in tensors]
    own = movable(*tensors)
    held = own.device_bytes()
    for _ in range(3):
        offload(own)
        assert own.on_host and own.device_bytes() == 0 and own.host_bytes() == held
        reload(own)
        assert not own.on_host and own.device_bytes() == held and own.host_bytes() == 0
        for tensor, value in zip(tensors, expected, strict=True):
            assert tensor.dtype == value.dtype and torch.equal(tensor, value)


def test_views_survive_and_shared_memory_moves_once():
    whole = torch.arange(100.0)
    view, transposed = whole[10:20], whole.view(10, 10).t()
    own = movable(view, transposed, whole)
    assert own.device_bytes() == 400
    offload(own)
    assert whole.untyped_storage().nbytes() == 0
    reload(own)
    assert torch.equal(view, torch.arange(10.0, 20.0)) and transposed[3, 2] == 23
    view += 1
    assert whole[10] == 11


def test_moves_are_idempotent_and_reported_once():
    own = movable(torch.ones(1000))
    reload(own)
    assert own.pop_moves() == []
    for _ in range(2):
        offload(own)
    for _ in range(2):
        reload(own)
    names, moves = zip(*own.pop_moves(), strict=True)
    assert names == ("states/to_host", "states/to_device")
    assert all(move.nbytes == 4000 and move.transfer_s > 0 and move.exposed_s > 0 for move in moves)
    assert own.pop_moves() == []


def test_the_next_move_waits_for_the_last():
    weights = torch.ones(10)
    own = movable(weights)
    own.offload()
    assert own.moving and weights.untyped_storage().nbytes() == 40
    own.reload()
    assert weights.untyped_storage().nbytes() == 40
    offload(own)
    assert own.on_host
    reload(own)
    assert torch.equal(weights, torch.ones(10))


def test_states_made_later_move_as_well_and_the_arena_grows():
    tensors = [torch.ones(1000)]
    arena = HostArena("states", None)
    own = Movable("states", lambda: tensors, arena, CPU)
    own.offload()
    reload(own)
    small = arena.nbytes
    assert own.device_bytes() == 4000
    tensors.append(torch.full((5000,), 2.0))
    own.recount()
    assert own.device_bytes() == 24_000
    offload(own)
    # The size is exact except for the alignment of each tensor's place.
    assert small == 4000 and 24000 <= arena.nbytes < 24000 + ALIGNMENT
    reload(own)
    assert torch.equal(tensors[1], torch.full((5000,), 2.0))
    own.offload()
    assert 24000 <= arena.nbytes < 24000 + ALIGNMENT


def test_a_release_never_loses_the_only_copy():
    weights = torch.ones(10)
    arena = HostArena("states", None)
    own = Movable("states", lambda: [weights], arena, CPU)
    offload(own)
    with pytest.raises(RuntimeError, match="states are in host memory only"):
        own.release()
    own.reload()
    own.release()
    assert arena.nbytes == 0 and torch.equal(weights, torch.ones(10))
    offload(own)
    reload(own)
    assert torch.equal(weights, torch.ones(10))


def test_too_little_host_memory_leaves_everything_in_place(monkeypatch):
    weights = torch.ones(10)
    own = movable(weights)
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: 39)
    with pytest.raises(HostMemoryError, match="states need"):
        offload(own)
    assert not own.on_host and torch.equal(weights, torch.ones(10))


def test_a_device_that_is_full_leaves_everything_on_the_host(monkeypatch):
    weights, more = torch.ones(10), torch.full((20,), 2.0)
    own = movable(weights, more)
    offload(own)
    resize = torch.UntypedStorage.resize_

    def without_room_for_the_second(storage, nbytes):
        if nbytes == 80:
            raise torch.OutOfMemoryError("full")
        return resize(storage, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", without_room_for_the_second)
        with pytest.raises(torch.OutOfMemoryError):
            own.reload()
        assert own.on_host and own.device_bytes() == 0
    reload(own)
    assert torch.equal(weights, torch.ones(10)) and torch.equal(more, torch.full((20,), 2.0))


def test_metrics_of_moves():
    metrics = move_metrics({"states/to_host": Move(nbytes=2_000_000_000, transfer_s=0.5, exposed_s=0.25)})
    assert metrics == {
        "states/to_host_bytes": 2e9,
        "states/to_host_s": 0.5,
        "states/to_host_exposed_s": 0.25,
        "states/to_host_gb_per_s": 4.0,
    }


def test_contents_come_back_into_the_same_memory():
    whole, other = torch.arange(10.0), torch.arange(5)
    view = whole[2:4]
    copy = HostCopy(lambda: [view, other], HostArena("weights", None), torch.device("cpu"))
    copy.take()
    whole.zero_()
    other.zero_()
    copy.put()
    copy.put()
    assert torch.equal(whole, torch.arange(10.0)) and torch.equal(other, torch.arange(5)) and view[0] == 2
    other += 1
    copy.take()
    other.zero_()
    copy.put()
    assert other.tolist() == [1, 2, 3, 4, 5]


def test_other_tensors_than_were_taken_are_an_error():
    tensors = [torch.ones(3)]
    copy = HostCopy(lambda: tensors, HostArena("weights", None), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="not those"):
        copy.put()
    copy.take()
    tensors.append(torch.ones(3))
    with pytest.raises(RuntimeError, match="not those"):
        copy.put()


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
        own.offload()
        assert own.device_bytes() == 0 and all(one.untyped_storage().nbytes() == 0 for one in tensors)
        own.reload()
        assert own.device_bytes() == whole and view.tolist() == list(range(10, 20))
        assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))


def test_they_are_copied_to_the_host_once():
    _, _, own = make()
    for _ in range(3):
        own.offload()
        own.offload()
        own.reload()
        own.reload()
    moves = own.pop_moves()
    assert [name for name, _ in moves] == ["weights/to_host", *["weights/to_device"] * 3]
    assert {move.nbytes for _, move in moves} == {own.device_bytes()} and own.pop_moves() == []


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_copy_is_blended_with_its_tensors(share, monkeypatch):
    """Each storage once, in parts; views, rounding to the type, and whole numbers, which have no mean."""
    monkeypatch.setattr(mover, "_BLENDED", 3)
    whole = torch.arange(8.0)
    tensors = [whole[:4], whole[2:], torch.full((5,), 1.0).bfloat16(), torch.tensor([7])]
    before = [tensor.clone() for tensor in tensors]
    copy = HostCopy(lambda: tensors, HostArena("weights", None), torch.device("cpu"))
    copy.take()
    whole += 1
    tensors[2].fill_(3.0)
    tensors[3].fill_(9)
    now = [tensor.clone() for tensor in tensors]
    copy.blend(share)
    assert all(torch.equal(one, other) for one, other in zip(tensors, now, strict=True))
    copy.put()
    for found, old, new in zip(tensors[:3], before, now, strict=False):
        assert torch.equal(found, (share * new.float() + (1 - share) * old.float()).to(found.dtype))
    assert tensors[3].item() == 9
