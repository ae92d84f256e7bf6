"""Fields of megatron-bridge's provider; the bridge itself is not needed."""

import sys
from types import SimpleNamespace

import pytest

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.policy.model import set_fields
from nemo_rl_lite.validation.compose import compose_config

MEGATRON = "policy.megatron_cfg"


def provided(monkeypatch, *overrides: str, **fields: object) -> SimpleNamespace:
    """Return a provider with these fields, after a configuration has set its own, on a CPU."""
    layers = SimpleNamespace(local_layer_spec=None)
    monkeypatch.setitem(sys.modules, "megatron.bridge.models.gpt_provider", layers)
    provider = SimpleNamespace(**fields)
    set_fields(provider, compose_config(list(overrides)).policy, on_gpu=False)
    return provider


def test_layers_for_multi_token_prediction_are_left_out(monkeypatch):
    """No loss would train them, and the draft of the engines has those of the checkpoint."""
    assert provided(monkeypatch, mtp_num_layers=1).mtp_num_layers is None


def test_overrides_come_last_and_have_the_fields_type(monkeypatch):
    given = f"{MEGATRON}.model_overrides={{masked_softmax_fusion: true, window_size: [8, 0]}}"
    provider = provided(monkeypatch, given, masked_softmax_fusion=True, window_size=None)
    assert provider.masked_softmax_fusion is True and provider.window_size == (8, 0)


def test_an_override_that_this_model_lacks_ends_the_run(monkeypatch):
    with pytest.raises(TrainingError, match=r"model_overrides.window_size: this model's SimpleNamespace"):
        provided(monkeypatch, f"{MEGATRON}.model_overrides.window_size=[8,0]")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], ("full", "uniform", 1, None)),
        (["recompute_method=block", "recompute_num_layers=3"], ("full", "block", 3, None)),
        (["recompute_granularity=selective"], ("selective", None, None, ["core_attn"])),
        (["recompute_granularity=selective", "recompute_modules=[mlp]"], ("selective", None, None, ["mlp"])),
    ],
)
def test_recomputation_has_megatrons_names(monkeypatch, keys, expected):
    names = ("granularity", "method", "num_layers", "modules")
    on = [f"{MEGATRON}.activation_checkpointing=true", *(f"{MEGATRON}.{key}" for key in keys)]
    provider = provided(monkeypatch, *on, **{f"recompute_{name}": None for name in names})
    assert tuple(getattr(provider, f"recompute_{name}") for name in names) == expected
