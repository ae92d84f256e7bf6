"""Watched copies bring weights where vLLM's own loader brings them: fused projections, padded vocabulary, experts."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.functional.ranks import run_ranks, run_script

pytestmark = pytest.mark.functional

SIZES = {
    # Padded by vLLM to a multiple of 64.
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "llama": {"tie_word_embeddings": False},
}


SCRIPT = Path(__file__).with_name("vllm_loader.py")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, list[Path]]:
    """Two models of each kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rl_lite.models.embedded import build_tokenizer

    parent = tmp_path_factory.mktemp("models")
    places = {kind: [parent / f"{kind}-{seed}" for seed in range(2)] for kind in MODELS}
    for seed, kind, folder in [(seed, kind, folder) for kind, own in places.items() for seed, folder in enumerate(own)]:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **MODELS[kind])).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    return places


def test_a_second_refit_without_the_loader_gives_what_the_loader_gives(folders, engine_environment, tmp_path):
    run_script(SCRIPT, ["{}", *chain(*folders.values())], engine_environment, tmp_path / "log")


# Options of vLLM; the shape of a rank's first matrices of experts, and the layers that have them on each rank.
SPLITS = {
    "tensor": ({"tensor_parallel_size": 2}, [4, 64, 64], [[0, 1], [0, 1]]),
    "pipeline": ({"pipeline_parallel_size": 2}, [4, 128, 64], [[0], [1]]),
    "experts": ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, [2, 128, 64], [[0, 1], [0, 1]]),
}


@pytest.mark.parametrize("split", SPLITS)
def test_each_rank_of_an_engine_takes_its_part_of_a_refit(split, folders, engine_environment, monkeypatch):
    for name, value in engine_environment.items():
        monkeypatch.setenv(name, value)
    options, shape, layers = SPLITS[split]
    printed = run_ranks(SCRIPT, [json.dumps(options), *map(str, folders["qwen3_moe"])], 2)
    for output, own in zip(printed, layers, strict=True):
        shapes = json.loads(output.strip().splitlines()[-1])
        experts = {name: shapes[name] for name in shapes if name.endswith("w13_weight")}
        assert list(experts.values()) == [shape] * len(own)
        assert [int(name.split(".")[2]) for name in experts] == own


LATE = """
import os, time
import torch.distributed as dist

dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    time.sleep(2)
    dist.new_group([1], use_local_synchronization=True)
"""


def test_a_rank_that_ends_first_leaves_the_others_their_store(tmp_path):
    """As a late rank of a pipeline, which makes its last groups alone."""
    (tmp_path / "late.py").write_text(LATE)
    run_ranks(tmp_path / "late.py", [], 2)
