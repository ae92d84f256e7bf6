"""The two sides of transports through buckets: a loop over buckets, with checksums and timing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.layout.packing import Arrived, buffer_of
from nemo_rl_lite.refit.layout.plan import Bucket, RefitPlan
from nemo_rl_lite.refit.transport.checksum import Checksums, Verify
from nemo_rl_lite.refit.transport.group import Flight, RefitGroup
from nemo_rl_lite.refit.transport.interface import Export, Loader, Offer, Transport
from nemo_rl_lite.refit.transport.report import RefitReport


@dataclass(frozen=True)
class Wire:
    """How buckets in buffers pass from producer to consumers: `start` starts to hand a bucket over, and `end` ends a
    refit, given the last buffer. Both sides start the buckets in order, the consumer each when its buffer may be
    filled, with `ahead` of them on the way, and finish each before they use its buffer again."""

    group: RefitGroup
    ahead: int
    start: Callable[[Tensor, Bucket], Flight]
    end: Callable[[Tensor], None]


class BucketBuffers(Protocol):
    """The producer's buffers, which it keeps from connection to connection. `memory`: of `new_buffers`."""

    memory: Tensor

    def offer(self) -> Offer: ...

    def wire(self, group: RefitGroup) -> Wire: ...


def bucket_transport(plan: RefitPlan, buffers: BucketBuffers, verify: Verify, export: Export) -> Transport:
    """The transport of what is exported into the buffers."""

    def sender(group: RefitGroup) -> BucketSender:
        return BucketSender(plan, buffers.wire(group), buffers.memory, verify, export)

    return Transport(buffers.offer, sender)


class _Side:
    def __init__(self, plan: RefitPlan, wire: Wire, buffers: Tensor, verify: Verify):
        """`buffers` (of `new_buffers`) are used by the buckets in turn."""
        self._plan, self._wire, self._buffers, self._verify = plan, wire, buffers, verify

    def _buffer(self, index: int) -> Tensor:
        return buffer_of(self._plan, self._buffers, index)

    def _start(self, index: int) -> Flight:
        return self._wire.start(self._buffer(index), self._plan.buckets[index])


class BucketSender(_Side):
    """A `Sender` that fills buffers from an `Export` and hands them over one by one.

    Its report has, in addition to the export's stages, `pack` (checksums) and `transfer` (waiting for consumers).
    """

    def __init__(self, plan: RefitPlan, wire: Wire, buffers: Tensor, verify: Verify, export: Export):
        super().__init__(plan, wire, buffers, verify)
        self._export = export

    def send(self) -> RefitReport:
        """See `Sender.send`."""
        self._export.start()
        try:
            return self._send(self._export)
        except RefitError:
            # Other ranks are still in the collectives of this refit.
            self._export.finish(self._buffer)
            raise

    def _send(self, export: Export) -> RefitReport:
        report, checksums, flights = RefitReport(), Checksums(self._verify), list[Flight]()
        self._wire.group.announce(self._plan.digest)
        for index in range(len(self._plan.buckets)):
            export.begin(index, report)
            clock = time.perf_counter()
            if index >= self._wire.ahead:
                flights[index - self._wire.ahead].finish()
            report.add("transfer", clock)
            export.fill(index, self._buffer(index), report)
            clock = time.perf_counter()
            checksums.add(self._buffer(index))
            flights.append(self._start(index))
            report.add("pack", clock)
        clock = time.perf_counter()
        for flight in flights:
            flight.finish()
        self._wire.end(self._buffer(len(self._plan.buckets) - 1))
        report.add("transfer", clock)
        report.checksums = checksums.values()
        return report


class BucketReceiver(_Side):
    """A `Receiver` that gives bucket after bucket to the loader."""

    def receive(self, loader: Loader) -> RefitReport:
        """See `Receiver.receive`."""
        report, checksums, buckets = RefitReport(), Checksums(self._verify), self._plan.buckets
        self._wire.group.expect(self._plan.digest)
        flights = [self._start(index) for index in range(min(self._wire.ahead, len(buckets)))]
        for index, bucket in enumerate(buckets):
            clock = time.perf_counter()
            flights[index].finish()
            report.add("transfer", clock)
            checksums.add(self._buffer(index))
            loader.fill(Arrived(index, bucket, self._buffer(index)))
            if len(flights) < len(buckets):
                flights.append(self._start(len(flights)))
        self._wire.end(self._buffer(len(self._plan.buckets) - 1))
        report.checksums = checksums.values()
        return report
