"""Moves between a GPU and pinned host memory."""

import time

import pytest
import torch

from nemo_rl_lite.offload.host_memory import CudaRegistrar, HostArena, LockError
from nemo_rl_lite.offload.mover import Movable

pytestmark = pytest.mark.gpu


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1 << 20,), (7, 333), (), (0,), (4097,)]
    floats = [torch.randn(shape, device="cuda") for shape in shapes]
    return [*floats, floats[0].to(torch.bfloat16), floats[0].to(torch.float16), torch.arange(99, device="cuda")]


@pytest.mark.parametrize("registrar", [CudaRegistrar, lambda: None], ids=["pinned", "pageable"])
def test_round_trips_are_exact_and_free_the_memory(registrar):
    held = tensors()
    expected = [tensor.cpu() for tensor in held]
    own = Movable("states", lambda: held, HostArena("states", registrar()), torch.device("cuda", 0))
    before, size = torch.cuda.memory_allocated(), own.device_bytes()
    for _ in range(3):
        own.offload()
        own.synchronize()
        assert own.device_bytes() == 0 and torch.cuda.memory_allocated() <= before - size
        own.reload()
        own.synchronize()
        for tensor, value in zip(held, expected, strict=True):
            assert torch.equal(tensor.cpu(), value)
    for _, move in own.pop_moves():
        assert move.nbytes == size and move.transfer_s > 0
    own.release()


def test_moves_begin_behind_the_work_that_was_given_before():
    weights = torch.zeros(1 << 26, device="cuda")
    own = Movable("weights", lambda: [weights], HostArena("weights", CudaRegistrar()), torch.device("cuda", 0))
    for turn in range(1, 4):
        # Still running when the move begins.
        torch.cuda._sleep(50_000_000)
        weights += 1
        own.offload()
        # Reading is fine meanwhile.
        assert float(weights[5]) == turn
        own.synchronize()
        own.reload()
        own.synchronize()
        weights *= 1
        assert bool((weights == turn).all())


def test_both_directions_move_beside_kernels_that_reuse_freed_memory():
    device, size = torch.device("cuda", 0), 1 << 24
    going, coming = torch.full((size,), 1.0, device="cuda"), torch.full((size,), 2.0, device="cuda")
    out = Movable("going", lambda: [going], HostArena("going", CudaRegistrar()), device)
    back = Movable("coming", lambda: [coming], HostArena("coming", CudaRegistrar()), device)
    back.offload()
    back.synchronize()
    noise = torch.randn(size, device="cuda")
    expected = noise * 3 + 1
    for turn in range(20):
        out.offload()
        back.reload()
        # Work on the default stream that takes and frees memory of the same size all the while.
        for _ in range(5):
            result = noise * 3
            result = result + 1
        out.synchronize()
        filler = torch.full((size,), 7.0, device="cuda")
        back.synchronize()
        assert torch.equal(result, expected) and bool((filler == 7).all()), turn
        assert bool((coming == 2).all()), turn
        del filler, result
        back.offload()
        out.reload()
        back.synchronize()
        out.synchronize()
        assert bool((going == 1).all()), turn


def test_an_arena_that_goes_leaves_its_address_usable():
    for _ in range(3):
        arena = HostArena("states", CudaRegistrar())
        arena.reserve(1 << 26)
        del arena
    assert float(torch.ones(4, device="cuda").sum()) == 4


def test_a_full_device_leaves_the_contents_on_the_host():
    free, _ = torch.cuda.mem_get_info()
    weights = torch.full((free // 4 // 4,), 3.0, device="cuda")
    own = Movable("weights", lambda: [weights], HostArena("weights", CudaRegistrar()), torch.device("cuda", 0))
    own.offload()
    own.synchronize()
    torch.cuda.empty_cache()
    hog = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.97), dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        own.reload()
    assert own.on_host
    del hog
    own.reload()
    own.synchronize()
    assert bool((weights == 3).all())


def test_a_refused_lock_is_an_error_that_leaves_nothing_behind():
    registrar, buffer = CudaRegistrar(), torch.zeros(1 << 20, dtype=torch.uint8)
    registrar.lock(buffer.data_ptr(), buffer.numel())
    with pytest.raises(LockError, match="already"):
        registrar.lock(buffer.data_ptr(), buffer.numel())
    # The next kernel is not blamed for it.
    assert float(torch.ones(4, device="cuda").sum()) == 4
    registrar.unlock(buffer.data_ptr())


def moved_before(nbytes: int) -> Movable:
    """A component on the device whose host memory was pinned by a first move."""
    weights = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    own = Movable("weights", lambda: [weights], HostArena("weights", CudaRegistrar()), torch.device("cuda", 0))
    own.offload()
    own.synchronize()
    own.reload()
    own.synchronize()
    own.pop_moves()
    return own


def test_a_small_copy_does_not_wait_for_a_large_move():
    own = moved_before(2 << 30)
    small = torch.zeros(8, device="cuda")
    own.offload()
    began = time.perf_counter()
    copied = small.cpu()
    waited = time.perf_counter() - began
    own.synchronize()
    ((_, move),) = own.pop_moves()
    assert bool((copied == 0).all())
    # A pinned move of 2 GiB takes some 40 ms.
    assert waited < move.transfer_s / 2


def test_kernels_do_not_wait_for_a_large_move():
    own = moved_before(4 << 30)
    small, ran = torch.zeros(8, device="cuda"), torch.cuda.Event(blocking=True)
    # The first use of a kernel loads it.
    small += 1
    own.offload()
    began = time.perf_counter()
    small += 1
    ran.record()
    ran.synchronize()
    waited = time.perf_counter() - began
    own.synchronize()
    ((_, move),) = own.pop_moves()
    # A pinned move of 4 GiB takes some 80 ms.
    assert waited < move.transfer_s / 2
