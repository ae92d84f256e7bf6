"""Producer and consumers over real gloo groups, one thread a rank."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.broadcast import Receiver, RefitReport, compare_checksums, send
from nemo_rl_lite.refit.packing import dtype_name
from nemo_rl_lite.refit.plan import RefitPlan, make_plan

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

# Seconds until a rank gives up where a peer does not answer; long enough to meet on a busy machine.
SHORT = 6.0


def plan_of(weights: dict[str, torch.Tensor], bucket_bytes: int) -> RefitPlan:
    return make_plan([(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in weights.items()], bucket_bytes)


def run(rank_functions, timeout_s: float = 20.0) -> list:
    """Each function gets its rank's group; the results, or the exceptions, in rank order."""
    store = refit_group.host_store("127.0.0.1", timeout_s)
    size = len(rank_functions)
    # All groups live until every rank is done, as in a run: gloo crashes if one end goes while the other is busy.
    groups = []

    def rank_main(rank: int):
        if rank == 0:
            group = refit_group.join(store, 0, size, timeout_s)
        else:
            group = refit_group.join_at("127.0.0.1", store.port, rank, size, timeout_s)
        groups.append(group)
        try:
            return rank_functions[rank](group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_main, range(size)))


def consume(plan: RefitPlan, group, verify: bool = True) -> tuple[dict[str, torch.Tensor], RefitReport]:
    receiver = Receiver(plan, group, verify)
    return dict(iter(receiver)), receiver.report


@pytest.mark.parametrize("bucket_bytes", [1, 2048, 10**9])
@pytest.mark.parametrize("consumers", [1, 2])
def test_every_consumer_gets_every_weight_bit_for_bit(bucket_bytes, consumers):
    plan = plan_of(WEIGHTS, bucket_bytes)
    producer = lambda group: send(plan, WEIGHTS.items(), group, verify=True)  # noqa: E731
    sent, *received = run([producer] + [lambda group: consume(plan, group)] * consumers)
    for weights, report in received:
        assert list(weights) == list(WEIGHTS)
        for name, weight in WEIGHTS.items():
            assert weights[name].dtype == weight.dtype
            assert torch.equal(weights[name], weight), name
        assert report.checksums == sent.checksums
        assert len(report.checksums) == len(plan.buckets)
    compare_checksums(plan, sent, [report for _, report in received])
    assert set(sent.seconds) == {"iterate", "pack", "transfer"}


def test_a_consumer_with_another_plan_refuses_before_the_first_weight():
    plan, other = plan_of(WEIGHTS, 2048), plan_of(WEIGHTS, 4096)
    _, refused = run(
        [lambda group: send(plan, WEIGHTS.items(), group, True), lambda group: consume(other, group)], SHORT
    )
    assert isinstance(refused, RefitError)
    assert "another plan" in str(refused)


def test_tensors_that_are_not_the_plans_are_refused():
    plan = plan_of(WEIGHTS, 10**9)
    wrong = {name: (weight.double() if name == "large" else weight) for name, weight in WEIGHTS.items()}
    fewer = dict(list(WEIGHTS.items())[:-1])
    more = WEIGHTS | {"extra": torch.zeros(1)}
    for weights, message in ((wrong, "large"), (fewer, "fewer tensors"), (more, "more tensors")):
        producer = lambda group, weights=weights: send(plan, weights.items(), group, True)  # noqa: E731
        error, _ = run([producer, lambda group: consume(plan, group)], SHORT)
        assert isinstance(error, RefitError)
        assert message in str(error)


def test_a_bucket_that_does_not_arrive_is_named():
    plan = plan_of(WEIGHTS, 2048)
    gone = threading.Event()

    def producer(group):
        group.broadcast(torch.frombuffer(bytearray(plan.digest), dtype=torch.uint8))
        gone.wait(60)

    def consumer(group):
        try:
            return consume(plan, group)
        finally:
            gone.set()

    _, error = run([producer, consumer], SHORT)
    assert isinstance(error, RefitError)
    assert "matrix" in str(error) and "bytes" in str(error) and f"limit {SHORT:g} s" in str(error)


def test_different_bytes_are_found_and_named():
    plan = plan_of(WEIGHTS, 2048)
    ours = RefitReport(checksums=[1, 2, 3, 4])
    with pytest.raises(RefitError, match=r"consumer 1 .* bucket 2 \("):
        compare_checksums(plan, ours, [RefitReport(checksums=[1, 2, 3, 4]), RefitReport(checksums=[1, 2, 9, 4])])
    with pytest.raises(RefitError, match="2 of 4 buckets"):
        compare_checksums(plan, ours, [RefitReport(checksums=[1, 2])])


def test_an_error_in_the_exporter_is_not_taken_for_its_end():
    plan = plan_of(WEIGHTS, 2048)

    def broken_export():
        yield from list(WEIGHTS.items())[:2]
        raise ValueError("the exporter broke")

    error, _ = run([lambda group: send(plan, broken_export(), group, True), lambda group: consume(plan, group)], SHORT)
    assert isinstance(error, ValueError)
