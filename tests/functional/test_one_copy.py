"""A policy whose frozen weights are in an engine's memory is the policy that has them itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_lite.config.sizes import ParallelDims
from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.models.shape import model_shape
from nemo_rl_lite.planning.parameters import rank_parameters, unlike_the_engine
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional


def test_training_with_shared_weights_is_the_same_to_the_bit(tmp_path, model_folder):
    run_ranks(Path(__file__).with_name("one_copy_rank.py"), [str(model_folder), str(tmp_path)], 1)
    own, shared = (torch.load(tmp_path / name, weights_only=False) for name in ("own", "shared"))
    assert (own["scored"] == shared["scored"]).all() and own["steps"] == shared["steps"]
    first, second = (load_file(tmp_path / f"{name}-hf" / "model.safetensors") for name in ("own", "shared"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    before = load_file(model_folder / "model.safetensors")
    assert any(not torch.equal(first[name], before[name]) for name in before)
    # All but the fused attention, as plans have it, and no more than that moves.
    shape, dims = model_shape(MODEL_CONFIG), ParallelDims(tp=1, pp=1, cp=1, ep=1, world=1)
    twice = 4 * unlike_the_engine(shape, dims, 0)
    assert shared["shared"].twice == twice
    assert shared["shared"].shared == 4 * rank_parameters(shape, dims, 0).total - twice
    assert own["own"] - shared["own"] == shared["shared"].shared
    assert own["moved"] - shared["moved"] == 2 * shared["shared"].shared
