"""NeMo-RL's published recipes, key by key: ours, by another name, without effect here, or refused with the reason."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_rl_lite.config import keys
from nemo_rl_lite.config.composition import compose_files, notes_on_names, with_implied_files
from nemo_rl_lite.config.keys import is_open, known_keys, unknown_key
from nemo_rl_lite.config.names import FromFile, in_our_names, meaning, with_our_references
from tests.unit.pages import DOCS

RECIPES = ("grpo", "sft", "dpo")
# What some keys of the recipes are here, as their values say there.
EXPECTED = {
    "grpo": {
        "algorithm.num_prompts_per_step": 32,
        "algorithm.loss_fn.reference_policy_kl_penalty": 0.01,
        "algorithm.oversample": 1,
        "algorithm.rollouts.source": "on_policy",
        "algorithm.reward_shaping.overlong_buffer_length": None,
        "algorithm.val_metric": "accuracy",
        "generation.max_new_tokens": 512,
        "policy.sequence_packing.train_mb_tokens": 2048,
        "policy.max_grad_norm": 1.0,
        "checkpoint.keep_best": 3,
        "data.name": "hub",
        "logger.mlflow.experiment": "grpo-dev",
    },
    "sft": {"algorithm.max_num_epochs": 1, "algorithm.val_metric": "val_loss", "data.train_on": "all"},
    "dpo": {"algorithm.reference_policy_kl_penalty": 0.05, "data.path": "nvidia/HelpSteer3", "data.name": "hub"},
}


def facts(algorithm: str) -> dict[str, object]:
    return yaml.safe_load((Path(__file__).parent / "commands" / f"nemo_rl_{algorithm}.txt").read_text())


def refused(algorithm: str) -> dict[str, str]:
    """Keys of a recipe that are neither ours nor accepted, with what they are answered."""
    found = {}
    for key, value in facts(algorithm).items():
        named = with_our_references(key, value)
        if key not in known_keys(algorithm) and not is_open(key) and not meaning(key, named, str(named), algorithm):
            found[key] = unknown_key(key, value, algorithm).fix
    return found


def test_the_page_names_each_key_without_a_counterpart():
    section = (DOCS / "from_nemo_rl.md").read_text().partition("## Keys without a counterpart")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([\w.]+)`", section, re.MULTILINE))
    assert named == {key for algorithm in RECIPES for key in refused(algorithm)}


@pytest.mark.parametrize("algorithm", RECIPES)
def test_a_key_that_is_refused_says_what_to_do(algorithm):
    for key, fix in refused(algorithm).items():
        assert not fix.startswith(("remove it", "the section is")), key


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The folder of recipes of a copy of configs/."""
    shutil.copytree(keys.config_dir(), tmp_path / "configs", symlinks=False)
    monkeypatch.setattr(keys, "config_dir", lambda: tmp_path / "configs")
    keys.groups.cache_clear()
    yield tmp_path / "configs" / "recipes"
    keys.groups.cache_clear()


def nested(flat: dict[str, object]) -> dict:
    whole: dict = {}
    for key, value in flat.items():
        node = whole
        *above, name = key.split(".")
        for one in above:
            node = node.setdefault(one, {})
        node[name] = value
    return whole


@pytest.mark.parametrize("algorithm", RECIPES)
def test_a_recipe_composes_as_a_file_of_ours(algorithm, recipes):
    left = {key: value for key, value in facts(algorithm).items() if key not in refused(algorithm)}
    (recipes / "theirs.yaml").write_text("# @package _global_\n" + yaml.safe_dump(nested(left)))
    composed = compose_files(["recipes=theirs"])
    assert composed.algorithm.name == algorithm
    plain = dict(keys.flatten(OmegaConf.to_container(composed, resolve=False)))
    assert {key for key in plain if key not in known_keys() and not is_open(key)} == set()
    assert {key: OmegaConf.select(composed, key) for key in EXPECTED[algorithm]} == EXPECTED[algorithm]
    assert any("is algorithm.max_num_steps=" in note for note in notes_on_names(["recipes=theirs"]))


def test_a_file_of_rows_is_chosen_by_its_key(recipes):
    assert compose_files(["data.train_path=x.jsonl"]).data.name == "file"
    assert compose_files(["data=gsm8k", "data.train_path=x.jsonl"]).data.prompt_column == "question"
    (recipes / "mine.yaml").write_text("# @package _global_\ndata:\n  train_path: x.jsonl\n  prompt_column: q\n")
    found = compose_files(["recipes=mine"]).data
    assert (found.name, found.prompt_column) == ("file", "q")


@pytest.mark.parametrize(
    ("overrides", "precision", "eager", "offloads"),
    [
        ([], "float32", True, []),
        (["cluster.gpus_per_node=2"], "bfloat16", False, "auto"),
        (["cluster.gpus_per_node=2", "policy=megatron"], "float32", False, []),
        (["cluster.gpus_per_node=2", "policy=megatron_gpu", "generation=vllm_gpu"], "bfloat16", False, []),
        (["cluster.gpus_per_node=2", "offload=none"], "bfloat16", False, []),
        (["cluster.gpus_per_node=2", "generation.vllm_cfg.enforce_eager=true"], "bfloat16", True, "auto"),
        (["recipes=grpo-smollm2-135m-1n1g"], "bfloat16", False, []),
        (["recipes=mine"], "bfloat16", False, "auto"),
    ],
)
def test_files_for_gpus_are_the_default_on_gpus(recipes, overrides, precision, eager, offloads):
    (recipes / "mine.yaml").write_text("# @package _global_\ncluster:\n  gpus_per_node: 1\n")
    found = compose_files(overrides)
    assert found == compose_files(with_implied_files(overrides))
    assert (found.policy.precision, found.generation.vllm_cfg.enforce_eager) == (precision, eager)
    assert found.policy.offload_for_generation == offloads


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("policy.refit_buffer_size_gb=0.5", ["refit.bucket_bytes=536870912"]),
        (
            "policy.optimizer.kwargs.betas=[0.9,0.98]",
            ["policy.megatron_cfg.optimizer.adam_beta1=0.9", "policy.megatron_cfg.optimizer.adam_beta2=0.98"],
        ),
        ("checkpointing.enabled=false", ["checkpoint.save_period=0"]),
        ("checkpointing.checkpoint_dir=results/x", ["hydra.run.dir=results/x"]),
        ("checkpointing.metric_name=val:accuracy", ["algorithm.val_metric=accuracy"]),
        ("grpo.async_grpo.enabled=true", ["algorithm.rollouts.source=queue"]),
        ("++policy.generation.temperature=0.5", ["generation.temperature=0.5"]),
        ("policy.megatron_cfg.optimizer.clip_grad='${policy.max_grad_norm}'", []),
        ("policy.generation.vllm_cfg.pipeline_parallel_size=2", ["generation.vllm_cfg.pipeline_parallel_size=2"]),
        ("policy.generation.vllm_cfg.expert_parallel_size=1", []),
        ("policy.generation.vllm_cfg.expert_parallel_size=8", ["generation.vllm_cfg.expert_parallel=true"]),
        ("data_plane.enabled=false", []),
        ("data_plane.enabled=true", ["data_plane.enabled=true"]),
        ("sft.max_num_steps=3", ["algorithm=sft", "algorithm.max_num_steps=3"]),
        ("logger.wandb=true", ["logger.wandb_enabled=true"]),
        ("policy.megatron_cfg.peft=true", ["policy.megatron_cfg.peft.enabled=true"]),
        ("algorithm.seed=3", ["algorithm.seed=3"]),
    ],
)
def test_a_name_of_nemo_rl_is_one_of_ours(given, ours):
    found, told = in_our_names([given])
    assert found == ours and bool(told) == (found != [given])


@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        (["grpo.seed=1", "algorithm.seed=2"], True),
        (["algorithm.seed=2", "grpo.seed=1"], True),
        (["algorithm.seed=1", "algorithm.seed=2"], False),
        (["grpo.seed=1", "sft.seed=2"], False),
        ([FromFile("grpo.seed=1", "mine.yaml"), "algorithm.seed=2"], False),
    ],
)
def test_two_names_of_one_key_are_noted(given, is_told):
    found, told = in_our_names(given)
    assert found[-1].endswith(given[-1].partition("=")[2])
    assert any(given[0] in note and given[1] in note for note in told) == is_told
