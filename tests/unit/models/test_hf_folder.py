"""A written Hugging Face folder names the tokens that end a response, and the precision of its weights."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.models.embedded import MODEL_CONFIG, build_tokenizer
from nemo_rl_lite.models.folder import complete_hf_folder, replacing, with_template
from nemo_rl_lite.models.shards import ShardWriter

CHATML = "{% for m in messages %}<im>{{ m.content }}</im>{% endfor %}{% if add_generation_prompt %}<im>{% endif %}"
OWN = build_tokenizer().eos_token_id


@pytest.fixture
def base(tmp_path) -> Path:
    """A base model, whose own end token is not that of ChatML's turns."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<im>", "</im>"]})
    tokenizer.save_pretrained(tmp_path / "base")
    Qwen3Config.from_dict(MODEL_CONFIG | {"vocab_size": len(tokenizer)}).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def write_hf_folder(weights: dict[str, torch.Tensor], source: Path, target: Path) -> None:
    with replacing(target) as folder:
        writer = ShardWriter(folder)
        for name, tensor in weights.items():
            writer.add(name, tensor)
        writer.close()
        complete_hf_folder(folder, source, writer.dtype)


def in_chatml(base: Path) -> Path:
    (template := base.parent / "chatml.jinja").write_text(CHATML)
    return with_template(base, template, base.parent / "templated")


def written(source: Path) -> tuple[GenerationConfig, Path]:
    target = source.parent / "exported"
    write_hf_folder({"w": torch.zeros(1)}, source, target)
    return GenerationConfig.from_pretrained(target), target / "generation_config.json"


def test_the_end_of_a_turn_of_the_chosen_template_is_named(base):
    own = {"eos_token_id": OWN, "temperature": 0.6, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(own))
    (base / "generation_config.json").chmod(0o444)
    source = in_chatml(base)
    config, file = written(source)
    turn = build_tokenizer().vocab_size + 1
    assert set(config.eos_token_id) == set(ChatTokenizer(source).end_tokens) == {OWN, turn}
    assert json.loads(file.read_text()) == own | {"eos_token_id": [OWN, turn]}
    assert json.loads((base / "generation_config.json").read_text()) == own


def test_the_models_other_end_tokens_stay(base):
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, OWN]}))
    config, _ = written(in_chatml(base))
    assert {7, OWN} < set(config.eos_token_id)


@pytest.mark.parametrize("content", [None, json.dumps({"eos_token_id": OWN})])
def test_a_model_that_names_them_all_stays_as_it_is(base, content):
    if content is not None:
        (base / "generation_config.json").write_text(content)
    write_hf_folder({"w": torch.zeros(1)}, base, base.parent / "exported")
    file = base.parent / "exported" / "generation_config.json"
    assert (file.read_text() if file.exists() else None) == content


@pytest.mark.parametrize("names", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_the_precision_is_that_of_the_weights(base, names):
    file = base / "config.json"
    plain = {
        name: value for name, value in json.loads(file.read_text()).items() if name not in ("dtype", "torch_dtype")
    }
    nested = {"text_config": dict.fromkeys(names, "bfloat16")} if names else {}
    file.write_text(json.dumps(plain | dict.fromkeys(names, "bfloat16") | nested))
    file.chmod(0o444)
    weights = {
        "w": torch.zeros(4),
        "scale": torch.zeros(2, dtype=torch.bfloat16),
        "count": torch.zeros(9, dtype=torch.int),
    }
    write_hf_folder(weights, base, base.parent / "exported")
    config = json.loads((base.parent / "exported" / "config.json").read_text())
    own = dict.fromkeys(names or ("dtype",), "float32")
    assert config == plain | own | ({"text_config": own} if names else {})
    assert Qwen3Config.from_pretrained(base.parent / "exported").dtype == torch.float32


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_mode_of_the_umask(base, umask):
    for file in base.iterdir():
        file.chmod(0o400)
    before = os.umask(umask)
    try:
        write_hf_folder({"w": torch.zeros(1)}, base, base.parent / "exported")
    finally:
        os.umask(before)
    folder = base.parent / "exported"
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o666 & ~umask}
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
