"""Fields of megatron-bridge's provider; the bridge itself is not needed."""

import sys
from types import SimpleNamespace

from nemo_rl_lite.policy.model import set_fields
from nemo_rl_lite.validation.compose import compose_config


def test_layers_for_multi_token_prediction_are_left_out(monkeypatch):
    """No loss would train them, and the draft of the engines has those of the checkpoint."""
    layers = SimpleNamespace(local_layer_spec=None)
    monkeypatch.setitem(sys.modules, "megatron.bridge.models.gpt_provider", layers)
    provider = SimpleNamespace(mtp_num_layers=1)
    set_fields(provider, compose_config([]).policy, on_gpu=False)
    assert provider.mtp_num_layers is None
