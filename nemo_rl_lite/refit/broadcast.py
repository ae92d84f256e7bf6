"""Weights from one producer to every consumer over a process group, several buckets on their way at a time.

While bucket k is sent, the producer exports and packs bucket k + 1 and the consumers load bucket k - 1. A side waits
for the broadcast from or into a buffer, and only for that; on a GPU what a consumer loads is ordered by its current
stream, behind which the buffer is filled anew.
"""

import time
from collections.abc import Iterator

from torch import Tensor

from nemo_rl_lite.refit.checksum import Checksums, Verify
from nemo_rl_lite.refit.group import Flight, RefitGroup
from nemo_rl_lite.refit.packing import Arrived, Export, buffer_of, new_buffers
from nemo_rl_lite.refit.plan import Bucket, RefitPlan
from nemo_rl_lite.refit.report import RefitReport


class BroadcastSender:
    """The producer's side: `send` as often as there are new weights. Takes its `buffers` once."""

    def __init__(self, plan: RefitPlan, group: RefitGroup, verify: Verify, buffers: int):
        self._plan, self._group, self._verify = plan, group, verify
        self._buffers = new_buffers(plan, buffers, group.device)

    def send(self, export: Export) -> RefitReport:
        """Send what is exported to every consumer of the group.

        Stages timed, as this process meets them, beside those of the export: `transfer` (what it waits for broadcasts).

        Raises:
            RefitError: tensors that are not the plan's, or a bucket that did not get through in time.
        """
        report, checksums, flights = RefitReport(), Checksums(self._verify), list[Flight]()
        self._group.announce(self._plan.digest)
        for index, bucket in enumerate(self._plan.buckets):
            export.begin(index, report)
            clock = time.perf_counter()
            if index >= len(self._buffers):
                flights[index - len(self._buffers)].finish()
            report.add("transfer", clock)
            buffer = self.buffer(index)
            export.fill(index, buffer, report)
            clock = time.perf_counter()
            checksums.add(buffer)
            report.add("pack", clock)
            flights.append(self._group.start(buffer, _described(bucket)))
        clock = time.perf_counter()
        for flight in flights:
            flight.finish()
        report.add("transfer", clock)
        report.checksums = checksums.values()
        return report

    def buffer(self, index: int) -> Tensor:
        """The memory that bucket `index` is sent from."""
        return buffer_of(self._plan, self._buffers, index)


class BroadcastReceiver:
    """One refit on the consumer's side: iterate over it for bucket after bucket, in `buffers` (of `new_buffers`) or,
    with `keep`, in memory of its own.

    Once the iteration is over, `report` has the checksums and the seconds of `transfer`.
    """

    def __init__(self, plan: RefitPlan, group: RefitGroup, buffers: Tensor, verify: Verify, keep: bool):
        self.report = RefitReport()
        self._plan, self._group, self._buffers, self._verify, self._keep = plan, group, buffers, verify, keep

    def __iter__(self) -> Iterator[Arrived]:
        """Raises RefitError: another plan than the producer's, or a bucket that did not arrive in time."""
        checksums, buckets = Checksums(self._verify), self._plan.buckets
        self._group.expect(self._plan.digest)
        flights = [self._start(index) for index in range(len(self._buffers))]
        for index, bucket in enumerate(buckets):
            clock = time.perf_counter()
            flights[index].finish()
            self.report.add("transfer", clock)
            buffer = self._buffer(index)
            checksums.add(buffer)
            yield Arrived(index, bucket, buffer.clone() if self._keep else buffer)
            if index + len(self._buffers) < len(buckets):
                flights.append(self._start(index + len(self._buffers)))
        self.report.checksums = checksums.values()

    def _start(self, index: int) -> Flight:
        return self._group.start(self._buffer(index), _described(self._plan.buckets[index]))

    def _buffer(self, index: int) -> Tensor:
        return buffer_of(self._plan, self._buffers, index)


def _described(bucket: Bucket) -> str:
    return f"{bucket.describe()}, {bucket.nbytes} bytes"
