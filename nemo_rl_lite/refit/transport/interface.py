"""What every transport has: an `Offer` from the producer to its consumers, a `Sender` and a `Receiver`.

There are three: direct.py (consumers copy the producer's parameters), shared.py (a buffer that both sides have open)
and broadcast.py (a collective). Consumers get the producer's offer, pickled; both sides join a process group; then the
producer sends and consumers receive at each refit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl_lite.refit.layout.packing import Arrived
from nemo_rl_lite.refit.layout.plan import RefitPlan
from nemo_rl_lite.refit.layout.views import StridedView
from nemo_rl_lite.refit.transport.checksum import Verify
from nemo_rl_lite.refit.transport.group import RefitGroup
from nemo_rl_lite.refit.transport.report import RefitReport

Window = tuple[str, int, StridedView, Tensor]
"""A tensor's name and number of elements, a window of it, and the contiguous memory that the window is copied to."""


class Sender(Protocol):
    """The producer's side of a joined group."""

    def send(self) -> RefitReport | None:
        """Bring the current weights to all consumers; None if there are none. Ranks that share a model call it
        together.

        Raises:
            RefitError: a consumer that was not done in time, or tensors that are not the plan's.
        """
        ...


class Export(Protocol):
    """The source of a sender's buckets. In each refit the sender calls `start`, then `begin` and `fill` for each bucket
    in turn, and `finish` if it gives up.

    `begin` and `fill` add their seconds to `report`: `iterate` for waiting, `pack` for copies.
    """

    def start(self) -> None:
        """Start a refit."""

    def begin(self, index: int, report: RefitReport) -> None:
        """Do what can be done for bucket `index` before there is memory for it."""

    def fill(self, index: int, buffer: Tensor, report: RefitReport) -> None:
        """Put the bucket's tensors into `buffer`, uint8 [bucket.nbytes]."""

    def finish(self, buffer_of: Callable[[int], Tensor | None]) -> None:
        """Do the rest of the collectives of this refit, in which other ranks still are. `buffer_of`: memory for a
        bucket, None on a rank that wants no weights."""


class Loader(Protocol):
    """What brings received weights to their places."""

    def fill(self, arrived: Arrived) -> None:
        """Take a bucket's tensors, whose memory the next bucket overwrites."""
        ...

    def windows(self) -> list[Window] | None:
        """After a first refit: every window of a tensor that is copied somewhere; None if the loader does more than
        copy."""
        return None

    def forget_buffers(self) -> None:
        """Keep no views of buckets' memory, so that it can be freed."""
        return


class Receiver(Protocol):
    """The consumer's side of a joined group."""

    def receive(self, loader: Loader) -> RefitReport:
        """Bring all weights to `loader`. Time is reported as `transfer`, which excludes the loader's.

        Raises:
            RefitError: another plan than the producer's, or weights that did not arrive in time or intact.
        """
        ...


class Offer(Protocol):
    """How consumers get the weights of one producer. It is pickled."""

    def group_device(self, device: torch.device) -> torch.device:
        """The device of the process group, for weights on `device`."""
        ...

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> Receiver:
        """The consumer's side, for an engine whose weights are on `device`."""
        ...


@dataclass(frozen=True)
class Transport:
    """The producer's side before consumers have joined."""

    offer: Callable[[], Offer]
    """Makes an offer for one connection."""
    sender: Callable[[RefitGroup], Sender]
    """Makes the sender of a joined group."""


class NoConsumers:
    """The `Sender` of a policy rank without consumers, which participates in the `export` of other ranks."""

    def __init__(self, export: Export | None):
        """`export`: None if no other rank needs this one."""
        self._export = export

    def send(self) -> None:
        if self._export is not None:
            self._export.start()
            self._export.finish(lambda index: None)


def settle(tensor: Tensor) -> None:
    """Wait until the tensor's device has done what it was asked for; another process does not see our streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
