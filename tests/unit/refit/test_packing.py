import pytest
import torch

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.packing import Arrived, Packer, new_buffers, same_bytes
from nemo_rl_lite.refit.plan import make_plan

PLAN = make_plan([("weight", (6, 4), "float32"), ("scalar", (), "int64"), ("empty", (0, 3), "bool")], 10**6)
VALUES = {"weight": torch.randn(6, 4), "scalar": torch.tensor(5), "empty": torch.zeros(0, 3, dtype=torch.bool)}
CPU = torch.device("cpu")


def packed(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    buffers = new_buffers(PLAN, 2, CPU)
    assert len(buffers) == len(PLAN.buckets) == 1
    packer = Packer(PLAN, buffers)
    for values in (VALUES, VALUES | changed):
        buffer = packer.pack(0, list(values.items()))
    return dict(Arrived(0, PLAN.buckets[0], buffer).named())


@pytest.mark.parametrize("split", [(2, 3, 4), (6, 1, 4), (1, 6, 4)])
def test_a_first_dimension_may_be_in_two(split):
    wide = torch.randn(2 * split[0], split[1], 4)
    part = wide[::2].as_strided(split, wide[::2].stride())
    found = packed(weight=part)
    assert torch.equal(found["weight"], part.reshape(6, 4)) and found["scalar"] == 5


@pytest.mark.parametrize("shape", [(4, 6), (24,), (6, 2, 2), (3, 4, 2), (2, 3, 2, 2)])
def test_other_shapes_of_as_many_elements_are_refused(shape):
    with pytest.raises(RefitError, match=r"expects weight \[6, 4\] float32, the model gave weight"):
        packed(weight=torch.zeros(shape))


def test_equal_bytes_are_equal_also_where_numbers_are_none():
    nan, zero = torch.tensor([[float("nan"), 1.0]]), torch.zeros(2)
    assert same_bytes(nan, nan.clone()) and not same_bytes(zero, -zero)
    assert not same_bytes(zero, torch.zeros(3))
