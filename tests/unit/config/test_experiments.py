"""Experiment files become overrides, with every value as it is; mistakes have the file's name and line."""

import json
import re
import shlex
from pathlib import Path

import pytest

from nemo_rl_lite.config.experiments import as_override, as_words, expanded
from nemo_rl_lite.config.keys import config_dir, parse_override
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.observability.environment import described
from nemo_rl_lite.run.command import jobs
from nemo_rl_lite.validation.compose import compose_config

STEPS = "algorithm:\n  max_num_steps: 7\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def write(name: str, text: str):
    Path(name).expanduser().parent.mkdir(parents=True, exist_ok=True)
    Path(name).expanduser().write_text(text)


@pytest.mark.parametrize("file", ["mine.yaml", "sub/mine.yml", "~/mine.yaml", "with space/mine.yaml"])
@pytest.mark.parametrize("word", ["{}", "recipes={}", "+recipes={}"])
def test_a_file_is_named_in_any_folder(file, word, folder):
    write(file, STEPS)
    file = file if word != "{}" else file.replace("~", str(folder / "home"))
    for name in (file, file if "~" in file else str(folder / file)):
        assert compose_config([word.format(name)]).algorithm.max_num_steps == 7
    given = compose_config(["algorithm.max_num_steps=3", word.format(file), "run_name=typed"])
    assert given.algorithm.max_num_steps == 3 and given.run_name == "typed"


@pytest.mark.parametrize("name", ["mine", "./mine", "sub/mine"])
def test_the_suffix_may_be_left_out(name):
    write(f"{name}.yaml", STEPS)
    assert compose_config([f"recipes={name}"]).algorithm.max_num_steps == 7


def test_a_file_has_the_form_of_a_recipe():
    """It begins with a recipe, lays files beside it over that, and chooses files of groups: its own or built-in."""
    write("lab/base.yaml", "algorithm.max_num_steps: 5\nrun_name: base\npolicy:\n  # seed: 1\n")
    write("lab/data/small.yaml", "defaults: [reverse_digits]\ntoo_long: drop\n")
    write("lab/memory.yaml", "# @package policy\nprecision: bfloat16\n")
    write(
        "lab/mine.yaml",
        "# @package _global_\ndefaults:\n- /recipes/grpo-tiny-1n0g-cpu-tp2\n- base\n- override /offload: logprob\n"
        "- data: small\n- memory.yaml\n- _self_\nrun_name: mine\n",
    )
    config = compose_config(["lab/mine.yaml"])
    assert config.policy.megatron_cfg.tensor_model_parallel_size == 2
    assert (config.run_name, config.algorithm.max_num_steps) == ("mine", 5)
    assert config.policy.offload_optimizer_states_for_logprob and config.policy.precision == "bfloat16"
    assert config.data.too_long == "drop"
    # What is typed counts more than the file's choice.
    assert not compose_config(["lab/mine.yaml", "offload=none"]).policy.offload_optimizer_states_for_logprob


def test_a_built_in_recipe_is_a_valid_file(folder):
    name = "grpo-tiny-1n0g-cpu-tp2"
    write("copy.yaml", (config_dir() / "recipes" / f"{name}.yaml").read_text())
    assert compose_config(["copy.yaml"]) == compose_config([f"recipes={name}"])


def test_groups_are_found_on_the_search_path(folder):
    write("lab/recipes/mine.yaml", STEPS)
    write("lab/data/small.yaml", "defaults: [reverse_digits]\ntoo_long: drop\n")
    for place in (f"hydra.searchpath=[file://{folder / 'lab'}]", "+hydra.searchpath=[lab]"):
        config = compose_config([place, "recipes=mine", "data=small"])
        assert config.algorithm.max_num_steps == 7
    write("lab/top.yaml", "hydra:\n  searchpath: [file://.]\ndata.name: reverse_digits\n")
    assert compose_config(["lab/top.yaml"])


VALUES = [
    "it's", 'a "b"', "back\\slash", "end\\", "\\'", "${oc.env:HOME}", "a,b=c", "", " ", "null", "1", "two\nlines", "é",
    1, -0.5, 1e-05, True, None, [], [1, "x", [None]], {"a": {"b c": 1}, "d": "x:y"}, {}, 10**20,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_is_the_same_as_an_override(value):
    override = parse_override(as_override("reward.kwargs.x", value))
    assert override is not None and not override.is_sweep_override()
    assert json.dumps(override.value(), sort_keys=True) == json.dumps(value, sort_keys=True)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("policy:\n  seeed: 1\n", 2, "policy.seeed"),
        ("run_name: x\nalgorithm:\n  seed: abc\n", 3, "algorithm.seed"),
        ("algorithm:\n  num_generations_per_prompt: 1\n", 2, "algorithm.num_generations_per_prompt"),
        ("policy:\n\tseed: 1\n", 2, "indent with spaces"),
        ("a: 1\nrun_name: x\nrun_name: y\n", 3, "duplicate key"),
        ("run_name: x\ndefaults:\n  - base\n  - data: gsm9k\n", 3, "recipes = 'base'"),
        ("defaults:\n  - override /data: gsm9k\n", 2, "gsm8k"),
        ("defaults:\n  - dota: file\n", 2, "did you mean data?"),
        ("defaults:\n  - [1]\n", 2, "chooses no file"),
        ("defaults:\n  - mine\n", 2, "includes itself"),
        ("defaults:\n  - absent.yaml\n", 2, "No such file"),
        ("run_name: ${x\n", 1, "run_name"),
        ("policy:\n  precision: ${nothing.here}\n", 2, "cannot be resolved"),
        ("hydra:\n  verbose: true\n", 2, "hydra.run.dir=FOLDER"),
        ("hydra.searchpath: [pkg://x]\n", None, "is not searched"),
        ("- a\n", None, "must have keys"),
    ],
)
def test_a_mistake_is_answered_with_its_file_and_line(text, line, says):
    write("sub/mine.yaml", text)
    with pytest.raises(ConfigError, match=re.escape(says)) as error:
        compose_config(["sub/mine.yaml"])
    assert line is None or f"sub/mine.yaml, line {line})" in str(error.value)


@pytest.mark.parametrize(
    ("word", "fix"), [("mime.yaml", "mine.yaml"), ("recipes=gone/grpo-tiny-1n0g-cpu.yaml", "recipes=grpo")]
)
def test_a_file_that_is_missing_is_answered_with_the_nearest(word, fix):
    write("mine.yaml", STEPS)
    with pytest.raises(ConfigError, match=fix):
        compose_config([word])


def test_a_sweep_runs_over_files():
    write("one.yaml", "algorithm.max_num_steps: 1\n")
    write("two.yaml", "algorithm.max_num_steps: 2\n")
    composed = [compose_config(job) for job in jobs(expanded(["recipes=one.yaml,two.yaml", "algorithm.seed=1,2"]))]
    assert [(one.algorithm.max_num_steps, one.algorithm.seed) for one in composed] == [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "recipes=grpo-tiny-1n0g-cpu-tp2 algorithm.max_num_steps=3 generation=transformers",
        "algorithm=sft policy.max_total_sequence_length=48 policy.train_global_batch_size=16 offload=pinned",
        "+reward.terms.x={name:format,weight:1,kwargs:{pattern:9}} environment=calculator",
        "policy.megatron_cfg.optimizer.lr=1e-3 policy.megatron_cfg.peft.enabled=true run_name=its",
        "cluster.gpus_per_node=1",
        "cluster.gpus_per_node=1 policy=megatron_gpu generation=vllm",
        "cluster.gpus_per_node=1 offload=none",
    ],
)
def test_a_run_is_repeated_from_its_record(words, folder):
    config = compose_config(shlex.split(words))
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(json.dumps(described(config)))
    assert compose_config(as_words(["--like", "run"])) == config
    again = compose_config(as_words(["--like=run/config.json", "algorithm.seed=77"]))
    assert again.algorithm.seed == 77 and again.policy == config.policy


def test_what_follows_from_a_changed_key_follows_in_a_repetition(folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(json.dumps(described(compose_config(["algorithm.max_num_steps=5"]))))
    words = ["like=run", "policy.max_total_sequence_length=64"]
    assert compose_config(words) == compose_config(["algorithm.max_num_steps=5", *words[1:]])


def test_a_secret_of_a_record_is_to_be_given(folder):
    (folder / "run").mkdir()
    config = compose_config(["+generation.vllm_kwargs.hf_token=abc"])
    (folder / "run" / "config.json").write_text(json.dumps(described(config)))
    with pytest.raises(ConfigError, match=r"generation.vllm_kwargs.hf_token=\.\.\."):
        compose_config(["like=run"])
    assert compose_config(["like=run", "+generation.vllm_kwargs.hf_token=abc"]) == config


@pytest.mark.parametrize("name", ["gone", "sweep"])
def test_a_folder_without_a_record_is_answered(name, folder):
    (folder / "sweep" / "0").mkdir(parents=True)
    (folder / "sweep" / "0" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="--like sweep/0" if name == "sweep" else "a folder that train has written"):
        compose_config([f"like={name}"])


@pytest.mark.parametrize(
    "words",
    [
        "--config lab/mine.yaml",
        "--config-dir lab --config-name mine",
        "-cd lab recipes=mine",
        "--config-dir=lab -cn=mine",
    ],
)
def test_options_name_files_too(words):
    write("lab/mine.yaml", STEPS)
    assert compose_config(as_words(words.split())).algorithm.max_num_steps == 7
