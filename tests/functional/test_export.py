"""Exported folders, of which no process holds all weights."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.rank import path_of
from tests.functional.ranks import run_ranks
from tests.functional.test_adapters import LORA, PIPELINE, TENSOR

pytestmark = pytest.mark.functional

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def test_ranks_share_the_shards(tmp_path, model_folder):
    two = ["cluster.cpu_ranks=2"]
    layouts = {"tensor": [*two, TENSOR], "pipeline": [*two, PIPELINE], "replicas": two, "lora": [*two, *LORA, TENSOR]}
    script = Path(__file__).with_name("export_rank.py")
    run_ranks(script, [str(model_folder), str(tmp_path), json.dumps(layouts)], 2)
    for name in layouts:
        found = torch.load(path_of(tmp_path, name), weights_only=False)
        folder = Path(f"{path_of(tmp_path, name)}.hf")
        files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
        weights = {weight: tensor for tensors in files.values() for weight, tensor in tensors.items()}
        assert weights.keys() == found["weights"].keys()
        assert all(torch.equal(tensor, found["weights"][weight]) for weight, tensor in weights.items())
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert all(weight in files[file] for weight, file in index.items()) and index.keys() == weights.keys()
        first, second = map(len, found["written"])
        assert first + second == len(files) and 0 <= first - second <= 1 < len(files)
        assert all("rank 1 cannot write" in raised and "No space left" in raised for raised in found["raised"])
        assert not any(left.startswith((folder.name, f".{folder.name}")) for left in found["left"])


def test_a_checkpoints_export_holds_a_part_of_the_model(tmp_path, monkeypatch):
    """The peak above that of two layers is a few layers and shards, where a whole model is 32."""
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("export_memory")
    runs = few, many = [tmp_path / str(layers) for layers in (2, 32)]
    for run in runs:
        bench.in_process(bench.make, run, int(run.name))
    peak = {run: bench.in_process(bench.peak_bytes, run, 40) for run in runs}
    assert peak[many] - peak[few] < 0.5 * bench.exported_bytes(many)
