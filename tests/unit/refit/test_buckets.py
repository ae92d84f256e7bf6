"""Producer and consumers over real gloo groups, one process a rank."""

import time
from pathlib import Path

import pytest
import torch

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.buckets import (
    BroadcastBuffers,
    BroadcastOffer,
    BucketChannel,
    BucketSender,
    SharedBuffer,
    Stream,
    bucket_transport,
)
from nemo_rl_lite.refit.group import RefitGroup
from nemo_rl_lite.refit.interface import Loader, RefitReport, compare_checksums
from nemo_rl_lite.refit.layout import RefitPlan, dtype_name, make_plan
from tests.unit.refit.ranks import CPU, SHORT, run

WEIGHTS = {
    "matrix": torch.randn(33, 17),
    "transposed": torch.randn(8, 5).T,
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "half": torch.randn(7).bfloat16(),
    "mask": torch.tensor([True, False, True]),
    "large": torch.randn(5000),
    "ids": torch.arange(9),
}


def plan_of(weights: dict[str, torch.Tensor], bucket_bytes: int) -> RefitPlan:
    return make_plan([(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in weights.items()], bucket_bytes)


class Flag:
    """Set by one process, waited for by another."""

    def __init__(self, path: Path):
        self._path = path

    def set(self) -> None:
        self._path.touch()

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._path.exists()


class Broadcast:
    """Both sides of a refit over the group itself."""

    count = 2

    def __init__(self, plan: RefitPlan):
        self._plan = plan

    def send(self, group: RefitGroup, tensors) -> RefitReport:
        return self.sender(group, Stream(self._plan, lambda: tensors)).send()

    def sender(self, group: RefitGroup, export: Stream):
        buffers = BroadcastBuffers(self._plan, self.count, CPU)
        return bucket_transport(self._plan, buffers, "full", export).sender(group)

    def receiver(self, group: RefitGroup, plan: RefitPlan | None = None):
        return BroadcastOffer(self.count).receiver(plan or self._plan, group, CPU, "full")


class ThroughSharedBuffer(Broadcast):
    """Both sides of a refit through a buffer that every rank opens for itself."""

    def __init__(self, plan: RefitPlan):
        super().__init__(plan)
        self._buffers = SharedBuffer(plan, CPU)
        self._offer = self._buffers.offer()

    def sender(self, group: RefitGroup, export: Stream):
        return BucketSender(
            BucketChannel.of_one_group(self._plan, group, self._offer.open(), is_shared=True), "full", export
        )

    def receiver(self, group: RefitGroup, plan: RefitPlan | None = None):
        return self._offer.receiver(plan or self._plan, group, CPU, "full")


class OneBuffer(Broadcast):
    count = 1


class ThreeBuffers(Broadcast):
    count = 3


WAYS = pytest.mark.parametrize("way", [Broadcast, ThroughSharedBuffer])


class Collected(Loader):
    """Weights, copied as they come, because a buffer is filled again."""

    def __init__(self, before_each=lambda: None):
        self.weights, self._before_each = {}, before_each

    def fill(self, arrived):
        self._before_each()
        self.weights |= {name: tensor.clone() for name, tensor in arrived.named()}


def consume(receiver) -> tuple[dict[str, torch.Tensor], RefitReport]:
    collected = Collected()
    report = receiver.receive(collected)
    return collected.weights, report


@pytest.mark.parametrize(
    ("way", "bucket_bytes", "consumers"),
    [
        *((way, 2048, 2) for way in (Broadcast, OneBuffer, ThreeBuffers, ThroughSharedBuffer)),
        *((way, bucket_bytes, 1) for way in (Broadcast, ThroughSharedBuffer) for bucket_bytes in (1, 10**9)),
    ],
)
def test_every_consumer_gets_every_weight_bit_for_bit(way, bucket_bytes, consumers):
    plan = plan_of(WEIGHTS, bucket_bytes)
    refit = way(plan)
    consumer = lambda group: consume(refit.receiver(group))  # noqa: E731
    sent, *received = run([lambda group: refit.send(group, WEIGHTS.items())] + [consumer] * consumers)
    for weights, report in received:
        assert list(weights) == list(WEIGHTS)
        for name, weight in WEIGHTS.items():
            assert weights[name].dtype == weight.dtype
            assert torch.equal(weights[name], weight), name
        assert report.checksums == sent.checksums
        assert len(report.checksums) == len(plan.buckets)
    for _, report in received:
        compare_checksums(plan, sent, report, "a consumer")
    assert set(sent.seconds) == {"iterate", "pack", "transfer"}


@pytest.mark.parametrize("way", [OneBuffer, Broadcast, ThroughSharedBuffer])
def test_a_slow_consumer_reads_each_bucket_before_its_memory_is_filled_again(way):
    """Eight large buckets through fewer buffers; the producer is always ahead, and one consumer of the other."""
    weights = {f"layer {index}": torch.full((300_000,), float(index)) for index in range(8)}
    plan = plan_of(weights, 10**6)
    assert len(plan.buckets) == 8
    refit = way(plan)

    def slow(group):
        collected = Collected(lambda: time.sleep(0.05 * group.rank))
        refit.receiver(group).receive(collected)
        return collected.weights

    _, *received = run([lambda group: refit.send(group, weights.items()), slow, slow])
    for seen in received:
        assert all(torch.equal(seen[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("buffers", [2, 3])
def test_the_producer_exports_and_sends_while_a_consumer_loads(buffers, tmp_path):
    """Buckets are exported and sent into each free buffer while the first is being loaded."""
    weights = {f"layer {index}": torch.full((1000,), float(index)) for index in range(8)}
    plan = plan_of(weights, 1)
    ahead = Flag(tmp_path / "ahead")

    class Way(Broadcast):
        pass

    Way.count = buffers
    refit = Way(plan)

    def exported():
        for index, named in enumerate(weights.items()):
            if index == 2 * buffers - 1:
                ahead.set()
            yield named

    def loading(group):
        was_ahead = []
        collected = Collected(lambda: was_ahead.append(ahead.wait(30)))
        refit.receiver(group).receive(collected)
        return was_ahead[0], collected.weights

    _, (was_ahead, received) = run([lambda group: refit.send(group, exported()), loading])
    assert was_ahead
    assert all(torch.equal(received[name], weight) for name, weight in weights.items())


def test_a_shared_buffer_is_one_memory_and_leaves_no_file_behind():
    shared = SharedBuffer(plan_of(WEIGHTS, 2048), CPU)
    memory, offer = shared.memory, shared.offer()
    other, third = offer.open(), shared.offer().open()
    del shared
    assert not Path(offer.file).exists()
    memory[0, 0] = 7
    assert other[0, 0] == third[0, 0] == 7
    assert memory.shape[0] == 2


@WAYS
def test_a_consumer_with_another_plan_refuses_before_the_first_weight(way):
    plan, other = plan_of(WEIGHTS, 2048), plan_of(WEIGHTS, 4096)
    refit = way(plan)
    producer = lambda group: refit.send(group, WEIGHTS.items())  # noqa: E731
    _, refused = run([producer, lambda group: consume(refit.receiver(group, other))], SHORT)
    assert isinstance(refused, RefitError)
    assert "different plans" in str(refused)


@WAYS
def test_tensors_that_are_not_the_plans_are_refused(way):
    plan = plan_of(WEIGHTS, 10**9)
    wrong = {name: (weight.double() if name == "large" else weight) for name, weight in WEIGHTS.items()}
    fewer = dict(list(WEIGHTS.items())[:-1])
    more = WEIGHTS | {"extra": torch.zeros(1)}
    for weights, message in ((wrong, "large"), (fewer, "fewer tensors"), (more, "more tensors")):
        refit = way(plan)
        producer = lambda group, refit=refit, weights=weights: refit.send(group, weights.items())  # noqa: E731
        (error,) = run([producer, lambda group, refit=refit: consume(refit.receiver(group))], wanted=1)
        assert isinstance(error, RefitError)
        assert message in str(error)


@WAYS
def test_a_bucket_that_does_not_arrive_is_named(way, tmp_path):
    plan = plan_of(WEIGHTS, 2048)
    gone = Flag(tmp_path / "gone")

    def producer(group):
        group.announce(plan.digest)
        gone.wait(60)

    def consumer(group):
        try:
            return consume(way(plan).receiver(group))
        finally:
            gone.set()

    _, error = run([producer, consumer], SHORT)
    assert isinstance(error, RefitError)
    assert "matrix" in str(error) and f"limit {SHORT:g} s" in str(error)


def test_different_bytes_are_found_and_named():
    plan = plan_of(WEIGHTS, 2048)
    ours = RefitReport(checksums=[1, 2, 3, 4])
    compare_checksums(plan, ours, RefitReport(checksums=[1, 2, 3, 4]), "engine 0")
    with pytest.raises(RefitError, match=r"engine 1 .* bucket 2 \("):
        compare_checksums(plan, ours, RefitReport(checksums=[1, 2, 9, 4]), "engine 1")
    with pytest.raises(RefitError, match="engine 1 received 2 of 4 buckets"):
        compare_checksums(plan, ours, RefitReport(checksums=[1, 2]), "engine 1")


@WAYS
def test_an_error_in_the_exporter_is_not_taken_for_its_end(way):
    plan = plan_of(WEIGHTS, 2048)

    def broken_export():
        yield from list(WEIGHTS.items())[:2]
        raise ValueError("the exporter broke")

    refit = way(plan)
    producer = lambda group: refit.send(group, broken_export())  # noqa: E731
    (error,) = run([producer, lambda group: consume(refit.receiver(group))], wanted=1)
    assert isinstance(error, ValueError)
