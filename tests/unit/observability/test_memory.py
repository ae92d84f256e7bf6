import pytest

from nemo_rl_lite.generation.remote import engine_memory
from nemo_rl_lite.observability.memory import MemoryMeter, with_rest


def test_components_are_measured_at_the_end_of_a_phase_and_the_most_counts():
    held = {"parameters": 10, "gradients": 0}
    meter = MemoryMeter(lambda: held)
    with meter.phase("train"):
        held["gradients"] = 5
    with meter.phase("train"):
        held["gradients"] = 3
    meter.note("generate")
    taken = meter.take()
    assert taken["measured/train/parameters"] == 10 and taken["measured/train/gradients"] == 5
    assert taken["measured/generate/gradients"] == 3
    assert meter.take() == {}


def test_working_memory_is_unknown_before_it_was_measured():
    meter = MemoryMeter(lambda: {"parameters": 10})
    assert meter.working_bytes("logprob") is None
    with pytest.raises(ZeroDivisionError), meter.phase("logprob"):
        raise ZeroDivisionError
    assert meter.working_bytes("logprob") == 0


def test_what_no_component_accounts_for_is_the_rest():
    memory = engine_memory({"device": 100, "generation_weights": 20, "kv_cache": 50})
    assert memory["measured/refit/generation_weights"] == 20
    whole = with_rest("generate", memory | {"measured/generate/parameters": 10.0, "measured/train/parameters": 10.0})
    assert whole["measured/generate/other"] == 20
    assert with_rest("generate", {"measured/generate/parameters": 10.0}) == {"measured/generate/parameters": 10.0}
