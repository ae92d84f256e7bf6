"""Measure moves of optimizer states between a GPU and host memory: python scripts/bench/offload_copies.py [GIGABYTES]

The states are 12 GB in 676 tensors by default. One run measures the link's raw rate from page-locked memory, the
package's moves, NeMo-RL's moves (tensor by tensor, pageable), and the first allocation of the host memory.
"""

import sys
import time
from collections.abc import Callable

import psutil
import record
import torch
from torch import Tensor

from nemo_rl_lite.offload.arena import CudaRegistrar, HostArena
from nemo_rl_lite.offload.mover import Movable

TENSORS = 676
REPETITIONS = 5
SLOW_REPETITIONS = 2


def main() -> None:
    total = int(float(sys.argv[1] if len(sys.argv) > 1 else 12.35) * 1e9)
    states = [torch.full((total // TENSORS // 4,), float(index), device="cuda") for index in range(TENSORS)]
    nbytes = sum(state.nbytes for state in states)
    gigabytes, config = nbytes / 1e9, f"{nbytes / 1e9:.2f} GB in {TENSORS} tensors"

    taken = first_use(nbytes)
    torch_pinned = [seconds(lambda: torch_pinned_buffer(nbytes)) for _ in range(SLOW_REPETITIONS)]
    arena = HostArena("states", CudaRegistrar())
    own = Movable("states", lambda: states, arena, torch.device("cuda", 0))
    resident = psutil.Process().memory_info().rss
    go(own, own.leave)
    grown = psutil.Process().memory_info().rss - resident
    go(own, own.come_back)
    raw_out, raw_in = raw_copies(arena, nbytes)
    ours_out = [seconds(lambda: go(own, own.leave)) for _ in both_ways(own)]
    ours_in = [seconds(lambda: go(own, own.come_back)) for _ in back_and_forth(own)]
    assert all(bool((state == index).all()) for index, state in enumerate(states)), "the states changed on the way"
    pageable_out, pageable_in = tensor_by_tensor(states)

    rates = {
        "raw page-locked copy, to host": raw_out,
        "raw page-locked copy, to device": raw_in,
        "ours, to host": ours_out,
        "ours, to device": ours_in,
        "pageable, tensor by tensor, to host": pageable_out,
        "pageable, tensor by tensor, to device": pageable_in,
    }
    results = [record.result(name, config, "GB/s", [gigabytes / one for one in times]) for name, times in rates.items()]
    results += [
        record.result("page-locked memory the first time, ours", config, "s", taken),
        record.result("page-locked memory the first time, torch's", config, "s", torch_pinned),
        record.result(
            "resident memory of the process that came with it", config, "share of what is needed", [grown / nbytes]
        ),
    ]
    median = {one["name"]: one["median"] for one in results}
    ours = (median["ours, to host"], median["ours, to device"])
    raw = (median["raw page-locked copy, to host"], median["raw page-locked copy, to device"])
    slow = (median["pageable, tensor by tensor, to host"], median["pageable, tensor by tensor, to device"])
    bars = [
        record.bar("to host, share of the raw rate", ours[0] / raw[0], 0.95, at_least=True),
        record.bar("to device, share of the raw rate", ours[1] / raw[1], 0.95, at_least=True),
        record.bar("offload, times the pageable rate", ours[0] / slow[0], 20, at_least=True),
        record.bar("first use, times faster than torch", _ratio(torch_pinned, taken), 4, at_least=True),
        record.bar("host memory, share of what is needed", grown / nbytes, 1.01, at_least=False),
    ]
    print(record.write("offload-copies", results, bars).read_text())


def first_use(nbytes: int) -> list[float]:
    """Return the seconds until the arena has its memory."""
    times = []
    for _ in range(3):
        arena = HostArena("states", CudaRegistrar())
        times.append(seconds(lambda arena=arena: arena.reserve(nbytes)))
        if not arena.locked:
            sys.exit("this machine does not page-lock the memory")
        arena.release()
    return times


def torch_pinned_buffer(nbytes: int) -> None:
    buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    del buffer
    # Empty torch's cache, so that the next repetition allocates.
    torch._C._host_emptyCache()


def raw_copies(arena: HostArena, nbytes: int) -> tuple[list[float], list[float]]:
    """Return the seconds of one copy of everything, out and in."""
    host, device = arena.reserve(nbytes), torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    out = [seconds(lambda: host.copy_(device, non_blocking=True)) for _ in range(REPETITIONS)]
    return out, [seconds(lambda: device.copy_(host, non_blocking=True)) for _ in range(REPETITIONS)]


def both_ways(own: Movable):
    """Time the way out; each repetition begins with everything on the device."""
    for _ in range(REPETITIONS):
        go(own, own.come_back)
        yield


def back_and_forth(own: Movable):
    """Time the way back; each repetition begins with everything on the host."""
    for _ in range(REPETITIONS):
        go(own, own.leave)
        yield


def go(own: Movable, begin: Callable[[], None]) -> None:
    begin()
    own.settle()


def tensor_by_tensor(states: list[Tensor]) -> tuple[list[float], list[float]]:
    """Move optimizer states as NeMo-RL's main branch does."""
    out, back = [], []
    for _ in range(SLOW_REPETITIONS):
        host: list[Tensor] = []
        out.append(seconds(lambda host=host, states=states: host.extend(state.to("cpu") for state in states)))
        for state in states:
            state.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        device: list[Tensor] = []
        back.append(seconds(lambda host=host, device=device: device.extend(state.to("cuda") for state in host)))
        states = device
    return out, back


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _ratio(slow: list[float], fast: list[float]) -> float:
    return sorted(slow)[len(slow) // 2] / sorted(fast)[len(fast) // 2]


if __name__ == "__main__":
    main()
