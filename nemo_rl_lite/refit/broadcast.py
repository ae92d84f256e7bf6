"""Weights from one producer to every consumer over a process group, bucket by bucket."""

import time
from collections.abc import Iterable, Iterator

from nemo_rl_lite.refit.checksum import checksum
from nemo_rl_lite.refit.group import RefitGroup
from nemo_rl_lite.refit.packing import new_buffer, pack, unpack
from nemo_rl_lite.refit.plan import Bucket, RefitPlan
from nemo_rl_lite.refit.report import Named, RefitReport, by_bucket


class BroadcastSender:
    """The producer's side: `send` as often as there are new weights."""

    def __init__(self, plan: RefitPlan, group: RefitGroup, verify: bool):
        self._plan, self._group, self._verify = plan, group, verify

    def send(self, tensors: Iterable[Named]) -> RefitReport:
        """Send `tensors`, which must come in the plan's order, to every consumer of the group.

        Stages timed: `iterate` (waiting for the next tensors), `pack`, `transfer`.

        Raises:
            RefitError: tensors that are not the plan's, or a bucket that did not get through in time.
        """
        report = RefitReport()
        self._group.announce(self._plan.digest)
        for bucket, named in by_bucket(self._plan, tensors, report):
            clock = time.perf_counter()
            buffer = new_buffer(bucket, self._group.device)
            pack(bucket, named, buffer)
            if self._verify:
                report.checksums.append(checksum(buffer))
            clock = report.add("pack", clock)
            self._group.broadcast(buffer, _described(bucket))
            report.add("transfer", clock)
        return report


class BroadcastReceiver:
    """One refit on the consumer's side: iterate over it for the named tensors of bucket after bucket.

    Every bucket has memory of its own, because an engine may keep tensors until it has all parts of a layer. Once the
    iteration is over, `report` has the checksums and the seconds of `transfer`.
    """

    def __init__(self, plan: RefitPlan, group: RefitGroup, verify: bool):
        self.report = RefitReport()
        self._plan, self._group, self._verify = plan, group, verify

    def __iter__(self) -> Iterator[list[Named]]:
        """Raises RefitError: another plan than the producer's, or a bucket that did not arrive in time."""
        self._group.expect(self._plan.digest)
        for bucket in self._plan.buckets:
            clock = time.perf_counter()
            buffer = new_buffer(bucket, self._group.device)
            self._group.broadcast(buffer, _described(bucket))
            self.report.add("transfer", clock)
            if self._verify:
                self.report.checksums.append(checksum(buffer))
            yield unpack(bucket, buffer)


def _described(bucket: Bucket) -> str:
    return f"{bucket.describe()}, {bucket.nbytes} bytes"
