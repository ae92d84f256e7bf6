import pytest
import torch

from nemo_rl_lite.observability.memory import MemoryMeter, with_rest
from nemo_rl_lite.workers.generation import engine_memory


class Device:
    """What torch.cuda reports about a GPU, and a policy's components on it."""

    def __init__(self, monkeypatch, **components: int):
        self.components, self.other, self.working, self.peak, self.cached = components, 0, 0, 0, 0
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "memory_allocated", self.allocated)
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(cuda, "max_memory_reserved", lambda: self.peak + self.cached)
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda: setattr(self, "peak", self.allocated()))
        monkeypatch.setattr(cuda, "mem_get_info", lambda: (1000 - 100 - self.allocated(), 1000))

    def allocated(self) -> int:
        return sum(self.components.values()) + self.other + self.working

    def compute(self, nbytes: int) -> None:
        self.working = nbytes
        self.peak = max(self.peak, self.allocated())
        self.working = 0

    def move(self, component: str, nbytes: int) -> None:
        self.components[component] = nbytes
        self.peak = max(self.peak, self.allocated())


def test_components_count_with_what_they_take_throughout_a_phase():
    held = {"parameters": 10, "states": 0}
    meter = MemoryMeter(lambda: held)
    with meter.phase("logprob"):
        held["states"] = 5
    meter.note("train")
    taken = meter.take()
    assert taken["measured/logprob/parameters"] == 10 and taken["measured/logprob/states"] == 0
    assert taken["measured/train/states"] == 5
    assert meter.take() == {}


def test_working_memory_is_what_a_phase_takes_beyond_components_and_buffers(monkeypatch):
    device = Device(monkeypatch, parameters=10, states=20)
    device.other = 7
    meter = MemoryMeter(lambda: device.components)
    with meter.phase("train"):
        device.compute(50)
        device.cached = 5
        device.compute(40)
    taken = meter.take()
    assert taken["measured/train/activations"] == meter.working_bytes("train") == 50
    assert taken["policy_peak_bytes/train"] == 87 and taken["policy_reserved_bytes/train"] == 92
    # The context's 100 bytes and the buffer.
    assert taken["device_bytes/train"] == 137 and taken["measured/train/other"] == 57


@pytest.mark.parametrize(("first", "second", "last"), [(50, 20, 10), (10, 50, 20), (10, 20, 50)])
def test_moves_within_a_phase_are_no_working_memory_and_hide_none(monkeypatch, first, second, last):
    device = Device(monkeypatch, parameters=10, states=200)
    meter = MemoryMeter(lambda: device.components)
    with meter.phase("logprob"):
        device.compute(first)
        with meter.moving():
            device.move("states", 0)
        device.compute(second)
        with meter.moving():
            device.move("states", 200)
        device.compute(last)
    assert meter.working_bytes("logprob") == 50


def test_what_no_component_accounts_for_is_the_rest():
    memory = engine_memory({"device": 100, "generation_weights": 20, "kv_cache": 50}, shares_device=True)
    assert memory["measured/refit/generation_weights"] == 20
    whole = with_rest("generate", memory | {"measured/generate/parameters": 10.0, "measured/train/parameters": 10.0})
    assert whole["measured/generate/other"] == 20
    apart = engine_memory({"device": 100, "generation_weights": 20, "kv_cache": 50}, shares_device=False)
    assert apart == {"engine/device": 100, "engine/generation_weights": 20, "engine/kv_cache": 50}
    assert with_rest("generate", apart) == apart
    assert with_rest("generate", {"measured/generate/parameters": 10.0}) == {"measured/generate/parameters": 10.0}
