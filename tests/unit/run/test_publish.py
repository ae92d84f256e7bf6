"""Model cards of exported folders, and their upload."""

import io
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard
from rich.console import Console

from nemo_rl_lite.errors import ConfigError, LauncherError
from nemo_rl_lite.models.folder import exported
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.run import publish
from nemo_rl_lite.run import run as run_module
from nemo_rl_lite.run.publish import push, write_cards
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.run.run_folders import make_run

LORA = "policy.megatron_cfg.peft.enabled=true"
HUB = ["data=hub", "data.path=org/rows", "data.validation_fraction=0.1", "policy.model_name=org/base"]
BASE_CARD = "---\nlicense: apache-2.0\nlanguage: [en]\ntags: [other]\nbase_model: org/older\n---\n# The base\n"


def cards(folder: Path, *overrides: str, base_card: str | None = None, step: int | None = None) -> list[ModelCard]:
    """The cards of a run with 6 steps, read back as the hub reads them."""
    config = compose_config(overrides)
    folders = exported(config, folder / "hf")
    for one in folders:
        one.mkdir(parents=True)
    if base_card is not None:
        (folders[0] / "README.md").write_text(base_card)
    write_cards(folders[0], config, make_run(folder / "run"), step)
    return [ModelCard.load(one / "README.md") for one in folders]


def test_the_base_and_its_license_are_named(tmp_path):
    (card,) = cards(tmp_path, *HUB, base_card=BASE_CARD)
    assert (card.data.base_model, card.data.datasets) == ("org/base", ["org/rows"])
    assert (card.data.license, card.data.language) == ("apache-2.0", ["en"])
    assert (card.data.library_name, card.data.tags) == ("transformers", ["nemo_rl_lite", "grpo"])
    assert "org/older" not in card.content and "# The base" not in card.content


def test_adapters_have_a_card_for_peft(tmp_path):
    model, adapter = cards(tmp_path, *HUB, LORA)
    assert (model.data.library_name, adapter.data.library_name) == ("transformers", "peft")
    assert "lora" in adapter.data.tags and adapter.data.base_model == "org/base"
    assert "AutoPeftModelForCausalLM" in adapter.text and "AutoPeftModelForCausalLM" not in model.text


@pytest.mark.parametrize(("tags", "base"), [("[nemo_rl_lite, sft]", "org/older"), ("[other]", None)])
def test_a_model_of_an_earlier_run_passes_its_base_on(tmp_path, tags, base):
    (card,) = cards(tmp_path, base_card=f"---\ntags: {tags}\nbase_model: org/older\n---\n")
    assert card.data.base_model == base


@pytest.mark.parametrize(("step", "rewards"), [(None, "| 0.100 | 0.600 |"), (4, "| 0.100 | 0.400 |")])
def test_results_are_those_until_the_exported_step(tmp_path, step, rewards):
    (card,) = cards(tmp_path, step=step)
    assert rewards in card.text and f"after {step or 6} steps of GRPO" in card.text


def test_settings_are_there_without_the_machines_folders(tmp_path):
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 40)
    (card,) = cards(
        tmp_path, "data=file", f"data.train_path={rows}", "data.validation_fraction=0.1", "algorithm.seed=7"
    )
    assert "train_path: rows.jsonl" in card.text and "seed: 7" in card.text
    assert str(tmp_path) not in card.content and "tensorboard" not in card.text


def test_sources_of_a_mixture_show_their_datasets_and_own_settings(tmp_path):
    own = ["data.sources.math.path=org/math", "data.sources.math.weight=3", "data.sources.code.path=org/code"]
    (card,) = cards(tmp_path, *HUB, *own, "data.sources.code.reward=last_number")
    assert card.data.datasets == ["org/math", "org/code"]
    settings = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])
    assert settings["data"]["sources"] == {
        "math": {"path": "org/math", "weight": 3.0},
        "code": {"path": "org/code", "weight": 1.0, "reward": {"name": "last_number"}},
    }


@pytest.mark.parametrize("card", ["no front matter", "---\n: [\n---\n", "---\n- a list\n---\n"])
def test_any_card_of_a_base_will_do(tmp_path, card):
    (own,) = cards(tmp_path, base_card=card)
    assert own.data.base_model is None


@pytest.fixture
def hub(monkeypatch):
    api = create_autospec(HfApi, instance=True)
    api.create_repo.return_value.repo_id = "org/name"
    monkeypatch.setattr(publish, "HfApi", lambda: api)
    return api


def test_a_model_and_its_adapters_are_pushed(hub, tmp_path):
    model, adapter = tmp_path / "hf", tmp_path / "adapter"
    push([model, adapter], "org/name", private=True)
    hub.create_repo.assert_called_once_with("org/name", private=True, exist_ok=True)
    sent = [call.kwargs for call in hub.upload_folder.call_args_list]
    assert [(one["repo_id"], one["folder_path"], one["path_in_repo"]) for one in sent] == [
        ("org/name", model, "."),
        ("org/name", adapter, "adapter"),
    ]


@pytest.mark.parametrize("method", ["create_repo", "upload_folder"])
def test_a_push_that_fails_names_the_commands_that_repeat_it(hub, tmp_path, method):
    getattr(hub, method).side_effect = ConnectionError("no route to the hub\nand more")
    with pytest.raises(LauncherError) as failed:
        push([tmp_path / "hf", tmp_path / "adapter"], "org/name", private=True)
    assert "no route to the hub; to try again" in str(failed.value)
    for folder, place in (("hf", "."), ("adapter", "adapter")):
        assert f"hf upload org/name {tmp_path / folder} {place} --private" in str(failed.value)


def test_a_run_whose_push_fails_is_done(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    hub.create_repo.side_effect = ConnectionError("no route to the hub")
    config, folder = compose_config(["checkpoint.push_to_hub=org/name"]), make_run(tmp_path / "run")
    (folder / "hf").mkdir()
    run_module._publish(config, folder, RunConsole(Console(file=(stream := io.StringIO()))))
    assert (folder / "hf" / "README.md").is_file() and "hf upload org/name" in stream.getvalue()


def test_a_push_needs_a_name_and_a_token(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils.get_token", lambda: None)
    with pytest.raises(ConfigError) as refused:
        compose_config(["checkpoint.push_to_hub=no/such/name"])
    assert [violation.key for violation in refused.value.violations] == ["checkpoint.push_to_hub"] * 2
    monkeypatch.setattr("huggingface_hub.utils.get_token", lambda: "hf_x")
    config = compose_config(["checkpoint.push_to_hub=org/name", "checkpoint.export_hf_at_end=false"])
    assert config.checkpoint.exports and config.checkpoint.hub_private_repo
