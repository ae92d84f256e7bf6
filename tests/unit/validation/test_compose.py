import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_lite.config import composition, keys
from nemo_rl_lite.config.schema_algorithm import GRPOConfig, SupervisedConfig
from nemo_rl_lite.config.sizes import micro_batch_sizes
from nemo_rl_lite.config.sources import in_source
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.observability.environment import described
from nemo_rl_lite.run.command import split_arguments
from nemo_rl_lite.validation.compose import compose_config, resolve, restore
from nemo_rl_lite.validation.notes import notes

HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "numpy")


def test_the_default_is_valid_and_frozen():
    config = compose_config()
    assert config.run_name == "grpo-reverse_digits"
    with pytest.raises(AttributeError):
        config.run_name = "other"


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_known_keys_work_with_and_without_plus(prefix):
    config = compose_config([f"{prefix}policy.offload_optimizer_states_for_logprob=true"])
    assert config.policy.offload_optimizer_states_for_logprob is True


def test_the_offload_preset_is_packaged_onto_the_policy():
    assert compose_config(["offload=logprob"]).policy.offload_optimizer_states_for_logprob is True


@pytest.mark.parametrize("prefix", ["", "+"])
def test_sections_of_others_take_new_keys(prefix):
    config = compose_config([f"{prefix}generation.vllm_kwargs.block_size=16", f"{prefix}reward.kwargs.weight=2"])
    assert config.generation.vllm_kwargs == {"block_size": 16}
    assert config.reward.kwargs == {"weight": 2}


def test_scientific_notation_and_whole_numbers_are_numbers():
    config = compose_config(["policy.megatron_cfg.optimizer.lr=1e-4", "refit.timeout_s=60"])
    assert config.policy.megatron_cfg.optimizer.lr == 1e-4
    assert config.refit.timeout_s == 60


@pytest.mark.parametrize(
    ("variable", "key", "good", "bad", "complaint"),
    [
        ("NRL_REFIT_BUFFER_MEMORY_RATIO", "buffer_memory_ratio", 0.5, "half", "must be a number"),
        ("NRL_REFIT_NUM_BUFFERS", "num_buffers", 3, "two", "must be an integer"),
    ],
)
def test_environment_variables_of_the_refit_are_read_and_bad_values_are_errors(
    variable, key, good, bad, complaint, monkeypatch
):
    monkeypatch.setenv(variable, str(good))
    assert getattr(compose_config().refit, key) == good
    monkeypatch.setenv(variable, bad)
    with pytest.raises(ConfigError, match=rf"refit.{key} = '{bad}'\n.*{complaint}"):
        compose_config()
    # What is empty is no number either.
    monkeypatch.setenv(variable, "")
    with pytest.raises(ConfigError, match=rf"{key}\n.*\n.*correct the environment variable {variable}"):
        compose_config()


def test_a_variable_that_nothing_reads_is_told(monkeypatch):
    monkeypatch.setenv("NRL_REFIT_NUM_BUFFER", "4")
    monkeypatch.setenv("NRL_REFIT_NUM_BUFFERS", "3")
    told = " ".join(notes(compose_config(), []))
    assert "NRL_REFIT_NUM_BUFFER " in told


@pytest.mark.parametrize("place", [[], ["policy=megatron_gpu", "cluster.gpus_per_node=1"]])
def test_a_model_of_the_users_has_room_for_the_users_rows(place):
    own = ["algorithm=sft", "policy.model_name=Qwen/Qwen3-0.6B", *place]
    assert compose_config(["algorithm=sft", *place]).policy.max_total_sequence_length == 32
    assert compose_config(own).policy.max_total_sequence_length == 1024
    given = compose_config([*own, "policy.max_total_sequence_length=32"])
    assert given.policy.max_total_sequence_length == 32


@pytest.mark.parametrize("engine", ["vllm", "vllm_gpu"])
def test_responses_and_micro_batches_of_a_model_of_the_users_follow_from_its_length(engine):
    def numbers(*overrides: str) -> tuple[int, int, int]:
        config = compose_config([f"generation={engine}", *overrides])
        policy, tokens = config.policy, config.generation.max_new_tokens
        return tokens, policy.train_micro_batch_size, policy.logprob_batch_size

    own, long = "policy.model_name=Qwen/Qwen3-0.6B", "policy.max_total_sequence_length=4096"
    assert numbers() == numbers("policy.max_total_sequence_length=128") == (8, 128, 128)
    assert numbers(own) == (512, 2, 2) and numbers(own, long) == (512, 1, 1)
    assert numbers(own, "policy.max_total_sequence_length=100") == (50, 20, 20)
    assert numbers(own, "generation.max_new_tokens=7", "policy.train_micro_batch_size=3") == (7, 3, 3)


def test_all_weights_of_a_model_of_the_users_are_trained_with_a_lower_rate():
    def rate(*overrides: str) -> float:
        return compose_config(list(overrides)).policy.megatron_cfg.optimizer.lr

    own, adapters = "policy.model_name=Qwen/Qwen3-0.6B", "policy.megatron_cfg.peft.enabled=true"
    assert rate() == rate(adapters) == rate(own, adapters) == 3e-4
    assert rate(own) == rate("algorithm=dpo", own) == 1e-6 and rate("algorithm=sft", own) == 5e-6
    assert rate(own, "policy.megatron_cfg.optimizer.lr=1e-3") == 1e-3


def test_a_length_that_is_none_is_the_only_error():
    with pytest.raises(ConfigError) as raised:
        compose_config(["policy.model_name=Qwen/Qwen3-0.6B", "policy.max_total_sequence_length=long"])
    assert [one.key for one in raised.value.violations] == ["policy.max_total_sequence_length"]


def test_a_model_of_few_positions_has_room_for_all_of_them(tmp_path):
    write_model(tmp_path / "short", max_position_embeddings=100)
    config = compose_config(["algorithm=sft", f"policy.model_name={tmp_path / 'short'}"])
    assert config.policy.max_total_sequence_length == 100


def write_model(folder: Path, max_position_embeddings: int) -> None:
    folder.mkdir(parents=True)
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    shape |= {"vocab_size": 49152, "max_position_embeddings": max_position_embeddings}
    (folder / "config.json").write_text(json.dumps(shape))
    for file in ("tokenizer_config.json", "model.safetensors"):
        (folder / file).write_text("{}")


def test_every_recipe_is_valid(tmp_path, monkeypatch):
    """Also where scripts/get_smollm2.py has not run: its model is a folder under the working directory, and so are the
    pairs that scripts/gsm8k_pairs.py writes."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "models" / "smollm2-135m-instruct", max_position_embeddings=8192)
    pair = json.dumps({"prompt": "2+2", "chosen": "4", "rejected": "5"})
    (tmp_path / "pairs.jsonl").write_text(f"{pair}\n" * 64)
    for name in keys.groups()["recipes"]:
        compose_config([f"recipes={name}"])


def test_a_recipes_keys_are_checked_too(tmp_path, monkeypatch):
    shutil.copytree(keys.config_dir(), tmp_path / "configs", symlinks=False)
    recipe = tmp_path / "configs" / "recipes" / "mine.yaml"
    recipe.write_text("# @package _global_\npolicy:\n  learning_rate: 1\n  precision: half\n")
    monkeypatch.setattr(keys, "config_dir", lambda: tmp_path / "configs")
    keys.groups.cache_clear()
    try:
        with pytest.raises(ConfigError) as error:
            compose_config(["recipes=mine"])
    finally:
        keys.groups.cache_clear()
    assert "policy.learning_rate" in str(error.value)


def test_flags_and_overrides_are_told_apart():
    flags, overrides = split_arguments(["-m", "a=1,2", "--cfg", "job", "--learning-rate", "1e-5", "b=3", "--resolve"])
    assert flags.given == ("-m", "--cfg", "job", "--learning-rate", "1e-5", "--resolve")
    assert overrides == ["a=1,2", "b=3"]


def test_the_config_package_imports_nothing_heavy():
    script = (
        "import sys, pkgutil, importlib, nemo_rl_lite.config as package\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        "    importlib.import_module('nemo_rl_lite.config.' + module.name)\n"
        f"sys.exit(str([name for name in {HEAVY} if name in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--cfg", "hydra"], ["--info", "defaults-tree"]])
def test_hydras_own_flags_work(flags):
    command = [sys.executable, "-m", "nemo_rl_lite.train", *flags, "+policy.offload_optimizer_states_for_logprob=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 10


@pytest.mark.parametrize(
    "override",
    [
        "reward.name=no.such.reward",
        "generation.max_new_tokens=32",
        "generation.vllm_cfg.tensor_parallel_size=2",
        "policy.logprob_batch_size=48",
        "policy.train_global_batch_size=384",
    ],
)
def test_rules_about_rollouts_are_not_for_sft(override):
    """What a recipe sets for GRPO is no error with another algorithm."""
    assert resolve(composition.compose_files(["algorithm=sft", override])).run_name == "sft-reverse_digits"
    with pytest.raises(ConfigError):
        compose_config([override])


def test_a_smaller_batch_needs_no_smaller_micro_batch():
    config = compose_config(["policy.train_global_batch_size=32", "algorithm.num_prompts_per_step=8"])
    assert micro_batch_sizes(config) == (32, 32) and config.policy.train_micro_batch_size == 128
    assert micro_batch_sizes(compose_config(["cluster.cpu_ranks=2"])) == (64, 64)
    assert micro_batch_sizes(compose_config(["policy.train_micro_batch_size=16"])) == (16, 16)
    assert micro_batch_sizes(compose_config(["policy.logprob_batch_size=64"])) == (128, 64)


def test_a_micro_batch_divides_the_share_of_a_rank():
    for most, size in ((48, 32), (127, 64), (3, 2), (1, 1)):
        assert micro_batch_sizes(compose_config([f"policy.train_micro_batch_size={most}"])) == (size, size)
    three = ["algorithm=sft", "policy.train_global_batch_size=21", "cluster.cpu_ranks=3"]
    assert micro_batch_sizes(compose_config([*three, "policy.train_micro_batch_size=4"])) == (1, 1)


def test_the_algorithms_options_are_those_of_its_name():
    sft, grpo = compose_config(["algorithm=sft", "algorithm.max_num_epochs=3"]), compose_config()
    assert sft.options(SupervisedConfig).max_num_epochs == 3
    assert grpo.options(GRPOConfig).num_prompts_per_step == 64
    with pytest.raises(TypeError, match="GRPOConfig expected, this run has SFTConfig"):
        sft.options(GRPOConfig)


def test_a_recipes_algorithm_is_spoken_of_when_a_key_of_it_is_wrong(tmp_path, monkeypatch):
    shutil.copytree(keys.config_dir(), tmp_path / "configs", symlinks=False)
    recipe = tmp_path / "configs" / "recipes" / "mine.yaml"
    content = "algorithm:\n  max_num_epoch: 1\n  loss_fn: null\n"
    recipe.write_text(f"# @package _global_\ndefaults:\n  - override /algorithm: sft\n{content}")
    monkeypatch.setattr(keys, "config_dir", lambda: tmp_path / "configs")
    keys.groups.cache_clear()
    try:
        with pytest.raises(ConfigError) as error:
            compose_config(["recipes=mine", "algorithm.max_num_epochs=2"])
    finally:
        keys.groups.cache_clear()
        assert [violation.key for violation in error.value.violations] == [
            "algorithm.max_num_epoch",
            "algorithm.loss_fn",
        ]
    assert "did you mean algorithm.max_num_epochs?" in str(error.value)
    assert "is a key of algorithm=grpo and algorithm=distillation only" in str(error.value)


def test_a_value_of_a_wrong_type_is_one_problem():
    """Rules that read it have nothing to say of the default in its place."""
    with pytest.raises(ConfigError) as raised:
        compose_config(["data=file", "data.train_path=5"])
    assert [violation.rule for violation in raised.value.violations if violation.key == "data.train_path"] == [
        "must be a file name"
    ]


def test_gsm8k_comes_from_the_hub_by_the_override_that_its_refusal_names():
    data = compose_config(["data=gsm8k", "data.name=hub"]).data
    assert (data.name, data.path, data.subset, data.validation_split) == ("hub", "openai/gsm8k", "main", "test")


def test_a_length_that_is_offered_suffices():
    given = ["policy.model_name=Qwen/Qwen3-8B", "generation.max_new_tokens=2048"]
    with pytest.raises(ConfigError, match=r"fix: policy\.max_total_sequence_length=4096, or generation"):
        compose_config(given)
    assert compose_config([*given, "policy.max_total_sequence_length=4096"])


def test_a_constant_rate_has_a_warm_up_of_any_length():
    scheduler = "policy.megatron_cfg.scheduler"
    config = compose_config([f"{scheduler}.lr_warmup_iters=2000"]).policy.megatron_cfg.scheduler
    assert config.lr_warmup_iters > config.lr_decay_iters and config.lr_decay_style == "constant"


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_a_configuration_of_an_earlier_version_is_read(algorithm):
    config = compose_config([f"algorithm={algorithm}"])
    recorded = described(config)
    recorded["refit"]["direct"] = recorded["refit"].pop("cuda_ipc")
    recorded["reward"]["max_error_share"] = recorded["reward"].pop("max_failure_fraction")
    recorded["checkpoint"]["resume_layouts"] = "any"
    del recorded["data"]["max_samples"], recorded["logger"], recorded["algorithm"]["val_period"]
    assert restore(json.dumps(recorded)) == config
    recorded["refit"]["colour"] = "blue"
    with pytest.raises(ConfigError, match=r"refit\.colour"):
        restore(json.dumps(recorded))
    with pytest.raises(ConfigError, match="not JSON"):
        restore('{"algorithm": ')


def test_sources_of_an_earlier_version_are_read():
    config = compose_config(["data.sources.a.weight=2", "data.sources.b.reward=last_number"])
    recorded = described(config)
    for section in (recorded, *recorded["data"]["sources"].values()):
        section["reward"]["max_error_share"] = section["reward"].pop("max_failure_fraction")
        del section["environment"]["timeout_s"]
    for data in (recorded["data"], *recorded["data"]["sources"].values()):
        del data["max_samples"]
    del recorded["data"]["sources"]["a"]["teacher"]
    assert restore(json.dumps(recorded)) == config


def test_null_removes_the_sources_of_a_file():
    assert compose_config(["data.sources.a.weight=2", "data.sources=null"]).data.sources == {}


def test_errors_of_a_source_keep_the_names_of_files():
    files = ["data.sources.a.train_path=/tmp/rv/data.jsonl", "data.sources.a.name=file"]
    with pytest.raises(ConfigError, match=r"\n +/tmp/rv/data\.jsonl: no such file"):
        compose_config(files)
    files = "reward.py:f, my-data.name, data.path/x, /agent.name"
    assert in_source("a", f"{files}: set reward.name") == f"{files}: set data.sources.a.reward.name"
    assert (
        in_source("a", "generation.max_new_tokens, data.name") == "data.sources.a.max_new_tokens, data.sources.a.name"
    )
    with pytest.raises(ConfigError, match=r"data\.sources\.a\.reward\.nme"):
        compose_config(["data.sources.a.reward.nme=math"])
    assert in_source("a", "data=hub reward=math") == "data.sources.a.preset=hub data.sources.a.reward=math"
