"""A model with a chat template from a file of the user's."""

import json
from pathlib import Path

import pytest

from nemo_rl_lite.data.problems import chat
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.embedded import build_tokenizer
from nemo_rl_lite.models.folder import with_template
from nemo_rl_lite.models.shape import NoModelError

OWN = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% if twice %}={% endif %}{% endif %}"
)


@pytest.fixture
def template(tmp_path) -> Path:
    (file := tmp_path / "own.jinja").write_text(OWN)
    return file


def written(folder: Path, **given: object) -> str:
    tokenizer = ChatTokenizer(folder, given)
    return tokenizer.text(tokenizer.prompt(chat("12")))


def test_it_is_taken_wherever_the_model_has_others(tmp_path, template):
    model = tmp_path / "model"
    build_tokenizer().save_pretrained(model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "7{{ messages[0].content }}"}))
    target = tmp_path / "run" / "model"
    for _ in range(2):
        assert with_template(model, template, target) == target
    assert written(target) == "12=" and written(target, twice=True) == "12=="
    assert (target / "tokenizer.json").resolve() == model / "tokenizer.json"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["thrice", "messages", "eos_token"])
def test_what_it_does_not_read_is_refused(tmp_path, template, name):
    model = tmp_path / "model"
    build_tokenizer().save_pretrained(model)
    with pytest.raises(ConfigError, match=rf"policy\.tokenizer\.chat_template_kwargs\.{name} = 1\n.*\n.*reads: twice"):
        ChatTokenizer(with_template(model, template, tmp_path / "own"), {name: 1})


def test_a_folder_with_files_of_its_own_is_left_alone(tmp_path, template):
    model = tmp_path / "model"
    build_tokenizer().save_pretrained(model)
    (link := tmp_path / "link").symlink_to(model)
    for target in (model, link):
        with pytest.raises(NoModelError, match="has other files"):
            with_template(model, template, target)
    assert written(model) and link.is_symlink()


def test_a_tokenizer_takes_it_without_another_folder(tmp_path, template):
    model = tmp_path / "model"
    build_tokenizer().save_pretrained(model)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        ChatTokenizer(model, {"twice": True})
    tokenizer = ChatTokenizer(model, {"twice": True}, str(template))
    assert tokenizer.text(tokenizer.prompt(chat("12"))) == "12=="
