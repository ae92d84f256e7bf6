"""Sizes of drafts, and the options that vLLM gets for them."""

import json

import pytest

from nemo_rl_lite.config.engines import has_draft_model, speculation
from nemo_rl_lite.models import embedded
from nemo_rl_lite.models.draft import DraftShape, draft_shape, draft_troubles, own_draft_layers
from nemo_rl_lite.models.shape import model_shape
from nemo_rl_lite.validation.compose import compose_config

LAYER = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60}
POLICY = model_shape({**LAYER, "num_hidden_layers": 2, "max_position_embeddings": 64})


def write(folder, config, weights: bytes = b"123"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


@pytest.mark.parametrize("config", [LAYER, {"transformer_layer_config": LAYER, "draft_vocab_size": 32}])
def test_a_draft_has_its_sizes_at_the_top_or_in_a_section(config, tmp_path):
    name = write(tmp_path / "draft", config)
    assert draft_shape(name) == DraftShape(layers=1, kv_heads=2, head_dim=16, weight_bytes=3)
    assert list(draft_troubles(name, POLICY, is_head=True)) == []


def test_a_narrow_head_of_a_wide_policy_is_fine(tmp_path):
    name = write(tmp_path / "draft", LAYER | {"hidden_size": 32, "target_hidden_size": 64})
    assert list(draft_troubles(name, POLICY, is_head=True)) == []


def test_a_model_that_drafts_may_have_any_width(tmp_path):
    name = write(tmp_path / "draft", LAYER | {"hidden_size": 32})
    assert list(draft_troubles(name, POLICY, is_head=False)) == []
    assert list(draft_troubles(name, POLICY, is_head=True)) == ["hidden_size is 32, and that of the policy is 64"]


def test_a_draft_of_the_hub_is_unknown_until_vllm_loads_it():
    assert draft_shape("someone/head") is None and list(draft_troubles("someone/head", POLICY, is_head=True)) == []


def test_layers_for_multi_token_prediction_are_counted(tmp_path):
    assert own_draft_layers(write(tmp_path / "a", {"num_nextn_predict_layers": 1})) == 1
    assert own_draft_layers(write(tmp_path / "b", {"text_config": {"mtp_num_hidden_layers": 2}})) == 2
    assert own_draft_layers(write(tmp_path / "c", LAYER)) == own_draft_layers(embedded.NAME) == 0
    assert own_draft_layers("someone/model") is None


@pytest.mark.parametrize(
    ("arguments", "options", "has_model"),
    [
        ("", None, False),
        ("generation.draft_tokens=5", None, False),
        (
            "generation.speculation=ngram",
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
            False,
        ),
        (
            "generation.speculation=ngram +generation.vllm_kwargs.speculative_config={prompt_lookup_max:5}",
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5},
            False,
        ),
        (
            "generation.speculation=eagle3 generation.draft_model=someone/head generation.draft_tokens=2",
            {"method": "eagle3", "num_speculative_tokens": 2, "model": "someone/head"},
            True,
        ),
        (
            "+generation.vllm_kwargs.speculative_config={method:suffix,num_speculative_tokens:4}",
            {"method": "suffix", "num_speculative_tokens": 4},
            False,
        ),
        ("generation=transformers generation.speculation=ngram", None, False),
    ],
)
def test_options_of_vllm(arguments, options, has_model):
    generation = compose_config(arguments.split()).generation
    assert speculation(generation) == options and has_draft_model(generation) == has_model


def test_a_folder_is_named_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "draft", LAYER | {"vocab_size": 64, "hidden_size": 128})
    arguments = ["generation.speculation=eagle3", "generation.draft_model=draft"]
    options = speculation(compose_config(arguments).generation)
    assert options is not None and options["model"] == str(tmp_path / "draft")
