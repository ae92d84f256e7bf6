"""A model's folder that is broken, or contradicts itself, is refused before anything starts."""

import json
import shutil
from pathlib import Path

import mistral_common
import pytest
import torch
from safetensors.torch import save_file

from nemo_rl_lite.data.problems import chat
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.embedded import MODEL_CONFIG, build_tokenizer
from nemo_rl_lite.models.folder import check_model_folder
from nemo_rl_lite.models.shape import NoModelError, find_shape, read_model_shape
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.run.model import starting_model
from nemo_rl_lite.validation.compose import compose_config

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model with two layers, as far as its files say."""
    made = tmp_path / "model"
    build_tokenizer().save_pretrained(made)
    (made / "config.json").write_text(json.dumps(MODEL_CONFIG | {"num_hidden_layers": 2}))
    (made / "generation_config.json").write_text("{}")
    embedding = torch.zeros(MODEL_CONFIG["vocab_size"], MODEL_CONFIG["hidden_size"])
    layers = {f"model.layers.{number}.mlp.up_proj.weight": torch.zeros(4) for number in range(2)}
    save_file({"model.embed_tokens.weight": embedding} | layers, made / "model.safetensors")
    return made


def change(folder: Path, **sizes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))


def cut(folder: Path, length: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])


def test_a_whole_model_is_accepted(folder):
    check_model_folder(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    # An additional layer that predicts further tokens is numbered on.
    change(folder, num_hidden_layers=1, num_nextn_predict_layers=1)
    check_model_folder(folder)


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (lambda folder: cut(folder, 0), r"model\.safetensors: is incomplete: its 0 bytes"),
        (lambda folder: cut(folder, 100), r"model\.safetensors: is incomplete: its 100 bytes"),
        (lambda folder: cut(folder, -1), r"model\.safetensors: has \d+ bytes, but its header expects \d+"),
        (
            lambda folder: (folder / "more.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
            r"more\.safetensors: is incomplete",
        ),
        (
            lambda folder: (folder / "more.safetensors").write_bytes(b"\2" + bytes(7) + b"[]"),
            r"more\.safetensors: is not a safetensors file",
        ),
        (
            lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "b.safetensors", "c": "d.safetensors"}}'),
            r"index\.json: names b\.safetensors and 1 more, which the folder lacks",
        ),
        (lambda folder: (folder / INDEX).write_text("{}"), r"index\.json: has no weight_map"),
        (lambda folder: change(folder, num_hidden_layers=8), r"num_hidden_layers is 8, but the weights have 2 layers"),
        (lambda folder: change(folder, num_hidden_layers=1), r"num_hidden_layers is 1, but the weights have 2 layers"),
        (lambda folder: change(folder, hidden_size=256), r"vocab_size and hidden_size are \[\d+, 256\]"),
        (lambda folder: change(folder, architectures=["BertForMaskedLM"]), r"BertForMaskedLM.*ForCausalLM"),
        (lambda folder: change(folder, architectures=None), r"config\.json: architectures = \[\]"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), r"generation_config\.json: is not JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), r"tokenizer\.json: is not JSON"),
    ],
)
def test_what_is_broken_is_named_with_its_file(folder, breaks, said):
    breaks(folder)
    with pytest.raises(NoModelError, match=said):
        check_model_folder(folder)


def test_a_run_checks_its_model_before_it_starts(folder):
    config = compose_config([f"policy.model_name={folder}"])
    assert starting_model(config, RunConsole()) == folder.resolve()
    cut(folder, -1)
    with pytest.raises(ConfigError, match=r"policy\.model_name = .*\n.*model\.safetensors: has \d+ bytes, but"):
        starting_model(config, RunConsole())


@pytest.mark.parametrize(
    ("size", "value"), [("num_hidden_layers", "four"), ("num_hidden_layers", -4), ("num_key_value_heads", 1.5)]
)
def test_a_size_that_is_none_is_named(folder, size, value):
    change(folder, **{size: value})
    said = f"{size} is {value!r}, which is not a whole number above 0"
    with pytest.raises(NoModelError, match=said):
        read_model_shape(str(folder))
    with pytest.raises(NoModelError, match=f"--model-config .*{said}"):
        find_shape("any/model", folder / "config.json")


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step-00000030"])
def test_a_runs_folder_is_answered_with_its_exported_model(folder, tmp_path, inside):
    (tmp_path / "run" / "checkpoints" / "step-00000030").mkdir(parents=True)
    exported = shutil.copytree(folder, tmp_path / "run" / "hf")
    with pytest.raises(ConfigError, match=f"fix: policy.model_name={exported}, which the run has exported"):
        compose_config([f"policy.model_name={tmp_path / 'run' / inside}"])


def test_of_mistrals_two_tokenizers_the_one_with_a_chat_template_is_taken(folder):
    own = ChatTokenizer(folder).prompt(chat("1 2"))
    tekken = Path(next(iter(mistral_common.__path__))) / "data" / "tekken_240718.json"
    shutil.copy(tekken, folder / "tekken.json")
    change(folder, model_type="mistral", architectures=["MistralForCausalLM"])
    assert ChatTokenizer(folder).prompt(chat("1 2")) == own
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"policy\.model_name = .*\n.*its only tokenizer, tekken.json"):
        ChatTokenizer(folder)


def test_a_broken_chat_template_is_an_error_of_the_model(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] ")
    with pytest.raises(ConfigError, match=r"policy\.model_name = .*\n.*chat template is broken: line 1"):
        ChatTokenizer(folder)
