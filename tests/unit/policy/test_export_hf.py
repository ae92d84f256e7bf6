"""Weights in Hugging Face format: gathered by all ranks, kept by one."""

import pytest
import torch

from nemo_rl_lite.models.embedded.build import build_tokenizer
from nemo_rl_lite.policy.megatron import conversion
from nemo_rl_lite.policy.megatron.conversion import export_folder


@pytest.fixture
def gathered(tmp_path, monkeypatch):
    """The tensors that an export has gathered; there is a folder to export from."""
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    names = []

    def export(model):
        assert model == "model"
        for name in "abc":
            names.append(name)
            yield name, torch.ones(2)

    monkeypatch.setattr(conversion, "export_weights", export)
    return names


@pytest.mark.parametrize("number", [0, 1])
def test_one_rank_writes_what_all_gather(gathered, number, tmp_path):
    export_folder("model", number, tmp_path / "model", tmp_path / "hf")
    assert gathered == list("abc")
    assert (tmp_path / "hf" / "model.safetensors").exists() == (number == 0)


def test_a_rank_that_cannot_keep_them_still_gathers(gathered, tmp_path, monkeypatch):
    def too_little_memory(weights):
        next(weights)
        raise MemoryError

    monkeypatch.setattr(conversion, "on_host", too_little_memory)
    with pytest.raises(MemoryError):
        export_folder("model", 0, tmp_path / "model", tmp_path / "hf")
    assert gathered == list("abc")
