"""Plans of buckets, and tensors in and out of them."""

import pytest
import torch

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.buckets import Stream
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.refit.layout import (
    ALIGNMENT,
    ReceivedBucket,
    buffer_of,
    make_plan,
    new_buffers,
    same_bytes,
)


def test_tensors_are_aligned_and_keep_their_order():
    plan = make_plan([("a", (3,), "float32"), ("b", (), "bfloat16"), ("c", (2, 100), "float32")], bucket_bytes=10_000)
    (bucket,) = plan.buckets
    assert [slot.name for slot in bucket.slots] == ["a", "b", "c"]
    assert [slot.offset for slot in bucket.slots] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert [slot.nbytes for slot in bucket.slots] == [12, 2, 800]
    assert bucket.nbytes == plan.nbytes == 4 * ALIGNMENT


def test_a_bucket_is_never_overfilled_and_a_large_tensor_gets_its_own():
    sizes = [("a", (100,)), ("b", (100,)), ("large", (5000,)), ("c", (10,)), ("empty", (0, 7))]
    plan = make_plan([(name, shape, "float32") for name, shape in sizes], bucket_bytes=1024)
    assert [[slot.name for slot in bucket.slots] for bucket in plan.buckets] == [["a", "b"], ["large"], ["c", "empty"]]
    assert all(bucket.nbytes % ALIGNMENT == 0 for bucket in plan.buckets)


def test_the_hash_changes_with_anything_the_sides_must_agree_on():
    tensors = [("a", (4,), "float32"), ("b", (4,), "float32")]
    digest = make_plan(tensors, 4096).digest
    assert digest == make_plan(tensors, 4096).digest
    others = [
        (list(reversed(tensors)), 4096),
        ([("a", (2, 2), "float32"), tensors[1]], 4096),
        ([("a", (4,), "int32"), tensors[1]], 4096),
        (tensors, 512),
    ]
    assert all(make_plan(*other).digest != digest for other in others)


PLAN = make_plan([("weight", (6, 4), "float32"), ("scalar", (), "int64"), ("empty", (0, 3), "bool")], 10**6)
VALUES = {"weight": torch.randn(6, 4), "scalar": torch.tensor(5), "empty": torch.zeros(0, 3, dtype=torch.bool)}
CPU = torch.device("cpu")


def packed(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    buffers, report = new_buffers(PLAN, 2, CPU), RefitReport()
    assert len(buffers) == len(PLAN.buckets) == 1
    buffer, export = buffer_of(PLAN, buffers, 0), Stream(PLAN, values.items)
    export.start()
    export.begin(0, report)
    export.fill(0, buffer, report)
    assert set(report.seconds) == {"iterate", "pack"}
    return dict(ReceivedBucket(0, PLAN.buckets[0], buffer).named())


def test_tensors_of_any_layout_are_packed():
    weight = torch.randn(4, 12)[:, ::2].t()
    found = packed(VALUES | {"weight": weight})
    assert torch.equal(found["weight"], weight) and found["scalar"] == 5 and found["empty"].shape == (0, 3)


@pytest.mark.parametrize("shape", [(4, 6), (24,), (6, 2, 2), (3, 2, 4), (2, 3, 2, 2)])
def test_other_shapes_of_as_many_elements_are_refused(shape):
    with pytest.raises(RefitError, match=r"expects weight \[6, 4\] float32, the model gave weight"):
        packed(VALUES | {"weight": torch.zeros(shape)})


def test_equal_bytes_are_equal_also_where_numbers_are_none():
    nan, zero = torch.tensor([[float("nan"), 1.0]]), torch.zeros(2)
    assert same_bytes(nan, nan.clone()) and not same_bytes(zero, -zero)
    assert not same_bytes(zero, torch.zeros(3))
