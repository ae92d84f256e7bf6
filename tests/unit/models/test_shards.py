"""Shards of one rank or several, which transformers reads as one model."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.models.shards import ShardWriter


def write(folder, weights, shard_bytes, ranks):
    writers = [ShardWriter(folder, shard_bytes, rank, ranks) for rank in range(ranks)]
    for name, tensor in weights.items():
        for writer in writers:
            writer.add(name, tensor)
    for writer in writers:
        writer.close()


def read(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("shard_bytes", "files"), [(1, 5), (1200, 3), (2000, 2), (10**9, 1)])
def test_ranks_write_each_tensor_once(tmp_path, ranks, shard_bytes, files):
    weights = {name: torch.randn(100 * (1 + number % 2)) for number, name in enumerate("abcde")}
    write(tmp_path, weights, shard_bytes, ranks)
    assert read(tmp_path).keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read(tmp_path).items())
    names = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    if files == 1:
        assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
        return
    assert names == [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())


def test_a_tensor_may_change_after_it_was_added(tmp_path):
    writer, tensor = ShardWriter(tmp_path), torch.ones(4)
    writer.add("w", tensor)
    tensor.zero_()
    writer.close()
    assert torch.equal(read(tmp_path)["w"], torch.ones(4))


def test_transformers_reads_the_shards(tmp_path):
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(MODEL_CONFIG)).eval()
    model.config.save_pretrained(tmp_path)
    write(tmp_path, dict(model.state_dict()), 200_000, 2)
    again = Qwen3ForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        assert torch.equal(model(tokens).logits, again(tokens).logits)
