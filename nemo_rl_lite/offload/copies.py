"""Copy many large tensors between device and host, a piece at a time, so that other work on the device gets its turn.

A thread gives a piece to the device when the one before is done. With one more piece waiting in its queue, logprobs and
a move took as long on an H100 as one after the other (docs/memory.md), and a small copy, such as a micro-batch's
logprobs on their way to the host, waited behind what was queued.
"""

import threading
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import foreach_copy

# 2.5 ms on a link of 50 GB/s: a short wait for others. Between two pieces the link is idle, 8 % of the time.
PIECE_BYTES = 128 << 20


class Copies:
    """Copies bytes, uint8 [n], from sources to targets. Copies begin at construction, after the earlier work of the
    device's current stream, and are done when `wait` returns."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: "torch.cuda.Stream | None"):
        """`pairs` are (target, source); `stream` runs the copies and is None on a CPU."""
        self._pairs, self._stream = list(pairs), stream
        self._began, self._seconds, self._alone = time.perf_counter(), 0.0, False
        self._error: BaseException | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._thread = threading.Thread(target=self._work, name="offload", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        return not self._thread.is_alive()

    def wait(self, alone: bool = False) -> None:
        """Wait until all copies are done. Raises any error that stopped them. `alone`: the device has no other work
        meanwhile, so that it may have all pieces at once."""
        self._alone = alone
        self._thread.join()
        if self._error is not None:
            raise self._error

    def seconds(self) -> float:
        """Return how long the copies took; valid when they are done."""
        return self._seconds

    def _work(self) -> None:
        try:
            if self._stream is None:
                for targets, sources in pieces(self._pairs):
                    _copy(targets, sources)
                self._seconds = time.perf_counter() - self._began
            else:
                self._feed(self._stream)
        except BaseException as error:
            self._error = error
        finally:
            # Drop the references, so that storages can be freed.
            self._pairs = []

    def _feed(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            # A blocking event does not spin on a core while it is waited for.
            done = torch.cuda.Event(blocking=True)
            begin.record()
            for targets, sources in pieces(self._pairs):
                _copy(targets, sources)
                if not self._alone:
                    done.record()
                    done.synchronize()
            end.record()
            end.synchronize()
            self._seconds = begin.elapsed_time(end) / 1e3


def pieces(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Cut and gather the copies into pieces, which are targets and their sources, of `PIECE_BYTES` each; the last one
    may have fewer."""
    targets, sources, room = list[Tensor](), list[Tensor](), PIECE_BYTES
    for target, source in pairs:
        if target.numel() != source.numel():
            raise ValueError(f"a copy of {source.numel()} bytes to {target.numel()}")
        begin = 0
        while begin < source.numel():
            cut = slice(begin, begin + room)
            targets.append(target[cut])
            sources.append(source[cut])
            room -= sources[-1].numel()
            begin = cut.stop
            if room <= 0:
                yield targets, sources
                targets, sources, room = [], [], PIECE_BYTES
    if targets:
        yield targets, sources


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    # One call for many: this thread has the interpreter in each, and takes it from the one that launches kernels.
    foreach_copy(targets, sources, non_blocking=True)
