import subprocess
import sys
import time

import pytest

from nemo_rl_lite.config import compose
from nemo_rl_lite.config.compose import compose_config
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.train import split_arguments

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


def test_environment_variable_sets_the_bucket_size_and_bad_values_are_errors(monkeypatch):
    monkeypatch.setenv("NRL_REFIT_BUFFER_MEMORY_RATIO", "0.5")
    assert compose_config().refit.buffer_memory_ratio == 0.5
    monkeypatch.setenv("NRL_REFIT_BUFFER_MEMORY_RATIO", "half")
    with pytest.raises(ConfigError, match=r"refit.buffer_memory_ratio = 'half'\n.*must be a number"):
        compose_config()


def test_an_empty_environment_variable_is_a_readable_error(monkeypatch):
    monkeypatch.setenv("NRL_REFIT_BUFFER_MEMORY_RATIO", "")
    with pytest.raises(ConfigError, match="buffer_memory_ratio"):
        compose_config()


def test_valid_but_unusual_overrides_are_accepted():
    assert compose_config(["recipes=null"]).run_name == "grpo-reverse_digits"
    assert compose_config(["generation.vllm_kwargs={block_size:16}"]).generation.vllm_kwargs == {"block_size": 16}
    config = compose_config(["policy.megatron_cfg.optimizer.lr=1e-6", "run_name='ünï-code'"])
    assert config.run_name == "ünï-code"


def test_every_recipe_is_valid():
    for name in compose.groups()["recipes"]:
        compose_config([f"recipes={name}"])


def test_a_recipes_keys_are_checked_too(tmp_path, monkeypatch):
    import shutil

    shutil.copytree(compose.config_dir(), tmp_path / "configs", symlinks=False)
    recipe = tmp_path / "configs" / "recipes" / "mine.yaml"
    recipe.write_text("# @package _global_\npolicy:\n  learning_rate: 1\n  precision: half\n")
    monkeypatch.setattr(compose, "config_dir", lambda: tmp_path / "configs")
    compose.groups.cache_clear()
    try:
        with pytest.raises(ConfigError) as error:
            compose_config(["recipes=mine"])
    finally:
        compose.groups.cache_clear()
    assert "policy.learning_rate" in str(error.value)


def test_every_key_has_a_comment_or_a_telling_name():
    """Keys that need explaining are explained: each YAML file of a group has comments, or fewer than four keys."""
    for file in compose.config_dir().glob("*/*.yaml"):
        text = file.read_text()
        assert "#" in text or text.count(":") < 4, file


def test_flags_and_overrides_are_told_apart():
    flags, overrides = split_arguments(["-m", "a=1,2", "--cfg", "job", "--config-dir", "here", "b=3", "--resolve"])
    assert flags == ["-m", "--cfg", "job", "--config-dir", "here", "--resolve"]
    assert overrides == ["a=1,2", "b=3"]


def test_bad_configs_are_reported_in_two_seconds_without_heavy_imports():
    script = (
        "import sys\n"
        "from nemo_rl_lite import train\n"
        "try: train.main(['policy.lr=1', 'algorithm.seed=x', 'policy.logprob_batch_size=48'])\n"
        f"finally: print([name for name in {HEAVY} if name in sys.modules], file=sys.stdout)\n"
    )
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        best = min(best, time.perf_counter() - started)
        assert done.returncode == 2, done.stderr
        assert done.stdout.strip() == "[]"
    assert best < 2


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
