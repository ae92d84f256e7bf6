"""Which runs a folder can go on with."""

import dataclasses

import pytest

from nemo_rl_lite.checkpoint.resume import checkpoint_store
from nemo_rl_lite.config.compose import compose_config
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.jobs.run import _open
from nemo_rl_lite.observability.run_folder import COMMAND_FILE, CONFIG_FILE
from nemo_rl_lite.observability.sinks import METRICS_FILE
from nemo_rl_lite.observability.summary import SUMMARY_FILE


def enter(folder, *overrides):
    _open(folder, dataclasses.asdict(compose_config(overrides)), "the command")


@pytest.fixture
def folder(tmp_path):
    """Of a run that was killed before it saved anything."""
    enter(tmp_path)
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    return tmp_path


def save(folder):
    store = checkpoint_store(compose_config(), folder)
    store.begin(10)
    store.finish(10, {}, {})


def test_the_same_command_starts_again_where_nothing_was_saved(folder):
    enter(folder, "logger.log_samples=9")
    assert (folder / COMMAND_FILE).read_text() == "the command\n" * 2


def test_another_one_does_not(folder):
    before = (folder / CONFIG_FILE).read_text()
    with pytest.raises(ConfigError, match="holds a run already, without a checkpoint"):
        enter(folder, "algorithm.seed=7")
    assert (folder / CONFIG_FILE).read_text() == before


def test_a_run_with_a_checkpoint_may_go_on_with_other_settings(folder):
    save(folder)
    enter(folder, "policy.megatron_cfg.optimizer.lr=1e-5")


@pytest.mark.parametrize(
    "overrides", [[], ["logger.log_samples=9"], ["algorithm.max_num_steps=99", "algorithm.seed=7"]]
)
def test_a_run_that_is_done_stays_as_it_is(folder, overrides):
    save(folder)
    (folder / SUMMARY_FILE).write_text("{}")
    with pytest.raises(
        ConfigError, match=r"it is done\n.*nothing but algorithm.max_num_epochs or algorithm.max_num_steps"
    ):
        enter(folder, *overrides)
    assert (folder / SUMMARY_FILE).exists()


def test_it_goes_on_where_it_is_given_more_steps(folder):
    save(folder)
    (folder / SUMMARY_FILE).write_text("{}")
    enter(folder, "algorithm.max_num_steps=99")
    assert not (folder / SUMMARY_FILE).exists()
