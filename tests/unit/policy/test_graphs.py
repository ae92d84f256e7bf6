"""When passes are recorded, and when graphs are dropped."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.policy import graphs
from nemo_rl_lite.policy.graphs import WARM_UPS, MicroBatchGraphs, _Shape
from nemo_rl_lite.policy.micro_batches import unpacked


class Again:
    def __init__(self):
        self.forgotten = 0

    def stream(self):
        return nullcontext()

    def record(self, function):
        return lambda: function().clone()

    def clear(self):
        self.forgotten += 1


@pytest.fixture
def weight():
    return torch.ones(3)


@pytest.fixture
def own(weight):
    model = SimpleNamespace(state=lambda: [weight], chunks=[], bare_chunks=[], device=torch.device("cpu"))
    found = MicroBatchGraphs(model, Again())
    found._drop_stale()
    return found


def given(value: float) -> dict[str, torch.Tensor]:
    return {"tokens_nS": torch.zeros(1, 4), "batch.tokens": torch.zeros(2, 2), "value": torch.tensor(value)}


def run(own: MicroBatchGraphs, name: str, times: int) -> _Shape:
    shape = own._shapes.setdefault(name, _Shape(lambda given: given["value"] * 2))
    for value in range(times):
        assert own._run(shape, given(float(value))) == value * 2
    return shape


def test_a_shape_is_recorded_after_its_first_passes_and_then_reads_what_it_is_given(own):
    assert run(own, "a", WARM_UPS).replay is None and own.recorded == 0
    shape = run(own, "a", 5)
    assert shape.replay is not None and own.recorded == 1
    assert unpacked(shape.given, given(0.0))["value"] == 4


def test_graphs_are_dropped_when_a_tensor_has_moved(own, weight):
    run(own, "a", WARM_UPS + 1)
    own._drop_stale()
    assert own.recorded == 1 and own._recorder.forgotten == 0
    weight.set_(torch.ones(3))
    own._drop_stale()
    assert own.recorded == 0 and own._recorder.forgotten == 1
    assert run(own, "a", WARM_UPS).replay is None


def test_graphs_are_dropped_when_another_shape_has_no_room(own, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    for name in ("a", "b"):
        run(own, name, WARM_UPS + 1)
        own._drop_stale()
    assert own.recorded == 2
    assert run(own, "c", WARM_UPS + 1).replay is None and own.recorded == 2
    own._drop_stale()
    assert own.recorded == 0
    assert run(own, "c", WARM_UPS + 1).replay is not None
