"""Many large copies between device and host, given to the device's copy engine a little at a time.

A copy engine does what it is given in that order: a small copy of another stream, such as a micro-batch's logprobs on
their way to the host, would wait behind everything that is queued. So a thread queues a few pieces, and the next when
one of them is done.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Some 5 ms on a link of 50 GB/s: short to wait behind, long enough to keep the link busy.
PIECE_BYTES, QUEUED = 64 << 20, 4


class Copies:
    """Copies of bytes, uint8 [n], from sources to targets. They begin when this is made, behind what the device's
    current stream was given before, and are done when `wait` returns."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: "torch.cuda.Stream | None"):
        """`pairs`: (target, source); `stream`: where they go, None on a CPU."""
        self._pairs, self._stream = list(pairs), stream
        self._began, self._seconds = time.perf_counter(), 0.0
        self._error: BaseException | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._thread = threading.Thread(target=self._work, name="offload", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Raises whatever stopped them."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def seconds(self) -> float:
        """How long they took; to be asked when they are done."""
        return self._seconds

    def _work(self) -> None:
        try:
            if self._stream is None:
                for target, source in pieces(self._pairs):
                    target.copy_(source)
                self._seconds = time.perf_counter() - self._began
            else:
                self._feed(self._stream)
        except BaseException as error:
            self._error = error
        finally:
            # Of a storage that is freed meanwhile nothing is held.
            self._pairs = []

    def _feed(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            queued, nbytes = deque[torch.cuda.Event](), 0
            begin.record()
            for target, source in pieces(self._pairs):
                target.copy_(source, non_blocking=True)
                nbytes += source.numel()
                if nbytes >= PIECE_BYTES:
                    queued.append(_recorded())
                    nbytes = 0
                if len(queued) > QUEUED:
                    queued.popleft().synchronize()
            end.record()
            end.synchronize()
            self._seconds = begin.elapsed_time(end) / 1e3


def pieces(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The same copies, none larger than a piece."""
    for target, source in pairs:
        yield from zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True)


def _recorded() -> torch.cuda.Event:
    # To wait without turning: the thread shares the process with the one that feeds the device its work.
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
