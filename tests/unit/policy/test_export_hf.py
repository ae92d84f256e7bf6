"""Weights in Hugging Face format: gathered by all ranks, kept by one."""

from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.policy.megatron import worker
from nemo_rl_lite.policy.megatron.worker import MegatronWorker


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """A worker of some rank, as far as an export needs one; `gathered` has the tensors that it gathered."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def make(number: int):
        gathered = []

        def export(model):
            assert model == "model"
            for name in "abc":
                gathered.append(name)
                yield name, torch.ones(2)

        monkeypatch.setattr(worker, "export_weights", export)
        made = SimpleNamespace(_require_whole=lambda *_: None, _model="model", _rank=number)
        made._model_path, made.gathered = tmp_path / "model", gathered
        return made

    return make


@pytest.mark.parametrize("number", [0, 1])
def test_one_rank_writes_what_all_gather(rank, number, tmp_path):
    own = rank(number)
    MegatronWorker.export_hf(own, str(tmp_path / "hf"))
    assert own.gathered == list("abc")
    assert (tmp_path / "hf" / "model.safetensors").exists() == (number == 0)


def test_a_rank_that_cannot_keep_them_still_gathers(rank, tmp_path, monkeypatch):
    def too_little_memory(weights):
        next(weights)
        raise MemoryError

    monkeypatch.setattr(worker, "on_host", too_little_memory)
    own = rank(0)
    with pytest.raises(MemoryError):
        MegatronWorker.export_hf(own, str(tmp_path / "hf"))
    assert own.gathered == list("abc")
