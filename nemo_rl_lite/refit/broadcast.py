"""Weights from one producer to every consumer, bucket by bucket."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.checksum import checksum
from nemo_rl_lite.refit.group import RefitGroup
from nemo_rl_lite.refit.packing import new_buffer, pack, unpack
from nemo_rl_lite.refit.plan import Bucket, RefitPlan


@dataclass
class RefitReport:
    """What one side did: seconds by stage, and the checksum of each bucket where they were asked for."""

    seconds: dict[str, float] = field(default_factory=dict)
    checksums: list[int] = field(default_factory=list)

    def add(self, stage: str, started: float) -> float:
        """Add the time since `started` to a stage; returns now."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - started
        return now


def send(plan: RefitPlan, tensors: Iterable[tuple[str, Tensor]], group: RefitGroup, verify: bool) -> RefitReport:
    """Send `tensors`, which must come in the plan's order, to every consumer of `group`.

    Stages timed: `iterate` (waiting for the next tensors), `pack`, `transfer`.

    Raises:
        RefitError: tensors that are not the plan's, or a bucket that did not get through in time.
    """
    report, source = RefitReport(), iter(tensors)
    _broadcast(group, torch.frombuffer(bytearray(plan.digest), dtype=torch.uint8), "the plan's hash")
    for bucket in plan.buckets:
        clock = time.perf_counter()
        named = list(islice(source, len(bucket.slots)))
        if len(named) < len(bucket.slots):
            missing = bucket.slots[len(named)].name
            raise RefitError(f"the model gave fewer tensors than the plan has: {missing} is missing")
        clock = report.add("iterate", clock)
        buffer = new_buffer(bucket, group.device)
        pack(bucket, named, buffer)
        if verify:
            report.checksums.append(checksum(buffer))
        clock = report.add("pack", clock)
        _broadcast(group, buffer, bucket)
        report.add("transfer", clock)
    extra = next(source, None)
    if extra is not None:
        raise RefitError(f"the model gave more tensors than the plan has: {extra[0]}")
    return report


class Receiver:
    """One refit on the consumer's side: iterate over it for `(name, tensor)` in the plan's order.

    Every bucket has memory of its own, because an engine may keep tensors until it has all parts of a layer. Once the
    iteration is over, `report` has the checksums and the seconds of `transfer`.
    """

    def __init__(self, plan: RefitPlan, group: RefitGroup, verify: bool):
        self.report = RefitReport()
        self._plan, self._group, self._verify = plan, group, verify

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Raises RefitError: another plan than the producer's, or a bucket that did not arrive in time."""
        digest = torch.zeros(len(self._plan.digest), dtype=torch.uint8)
        _broadcast(self._group, digest, "the plan's hash")
        if bytes(digest.tolist()) != self._plan.digest:
            raise RefitError("the producer sends by another plan than this consumer has; connect the refit anew")
        for bucket in self._plan.buckets:
            clock = time.perf_counter()
            buffer = new_buffer(bucket, self._group.device)
            _broadcast(self._group, buffer, bucket)
            self.report.add("transfer", clock)
            if self._verify:
                self.report.checksums.append(checksum(buffer))
            yield from unpack(bucket, buffer)


def compare_checksums(plan: RefitPlan, sent: RefitReport, received: Iterable[RefitReport]) -> None:
    """Raises RefitError naming the bucket: a consumer's bytes differ from the producer's."""
    for consumer, report in enumerate(received):
        if len(report.checksums) != len(sent.checksums):
            raise RefitError(f"consumer {consumer} received {len(report.checksums)} of {len(sent.checksums)} buckets")
        for index, (theirs, ours) in enumerate(zip(report.checksums, sent.checksums, strict=True)):
            if theirs != ours:
                where = f"bucket {index} ({plan.buckets[index].describe()})"
                raise RefitError(f"consumer {consumer} received other bytes than were sent in {where}")


def _broadcast(group: RefitGroup, tensor: Tensor, what: Bucket | str) -> None:
    try:
        group.broadcast(tensor)
    except RuntimeError as error:
        described = what if isinstance(what, str) else f"{what.describe()}, {what.nbytes} bytes"
        cause = str(error).splitlines()[0]
        limit = group.timeout.total_seconds()
        raise RefitError(f"rank {group.rank} could not broadcast {described} (limit {limit:g} s): {cause}") from error
