"""What a run's steps decide is asked again where its data says how many there are."""

import pytest

from nemo_rl_lite.algorithms.supervised import shown_limits
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rules.compose import compose_config
from nemo_rl_lite.rules.steps import check_epochs, check_total_steps

LATE = ["algorithm=sft", "algorithm.val_at_start=false", "algorithm.val_at_end=false", "algorithm.val_period=20"]


def refused(*arguments: str, total: int = 10) -> str:
    with pytest.raises(ConfigError) as caught:
        check_total_steps(compose_config([*LATE, *arguments]), total)
    return str(caught.value)


def test_a_warm_up_as_long_as_the_run_is_told(caplog):
    config = compose_config(["algorithm=sft", "policy.megatron_cfg.scheduler.lr_warmup_iters=10"])
    check_total_steps(config, 11)
    assert not caplog.records
    check_total_steps(config, 10)
    assert "lr_warmup_iters = 10: the run has 10 optimizer steps" in caplog.text


@pytest.mark.parametrize(
    ("steps", "epochs", "per_epoch", "shown"),
    [
        (
            "60",
            "3",
            267,
            "the run ends after 60 steps, by algorithm.max_num_steps = 60; algorithm.max_num_epochs = 3 wo",
        ),
        (
            "500",
            "1",
            10,
            "the run ends after 10 steps, by algorithm.max_num_epochs = 1; algorithm.max_num_steps = 500 wo",
        ),
        ("null", "1", 10, ""),
        ("60", "null", 10, ""),
        ("60", "3", None, ""),
        ("30", "3", 10, ""),
    ],
)
def test_the_limit_that_ends_a_run_is_said(steps, epochs, per_epoch, shown):
    keys = [f"algorithm.max_num_steps={steps}", f"algorithm.max_num_epochs={epochs}"]
    keys += ["data=hub", "data.path=a/b", "data.validation_fraction=0.1"]
    said = shown_limits(compose_config(["algorithm=sft", *keys]).algorithm, per_epoch)
    assert said.startswith(shown) and bool(said) == bool(shown)


def test_a_step_with_more_prompts_than_the_data_has(caplog):
    config = compose_config(["algorithm.num_prompts_per_step=8", "policy.train_global_batch_size=64"])
    check_epochs(config, 8)
    check_epochs(config, 0)
    assert not caplog.records
    check_epochs(config, 5)
    assert "algorithm.num_prompts_per_step = 8: the data has 5 prompts" in caplog.text


def test_prompts_that_never_come_back_cannot_rest(caplog):
    config = compose_config(["algorithm.rest_epochs=4", "algorithm.max_num_steps=2"])
    check_epochs(config, 127)
    assert not caplog.records
    check_epochs(config, 128)
    assert "algorithm.rest_epochs = 4: no prompt comes back in this run" in caplog.text
    with pytest.raises(ConfigError, match="needs data with epochs"):
        check_epochs(config, 0)


def test_a_decay_that_the_run_does_not_reach_is_told(caplog):
    scheduler = "policy.megatron_cfg.scheduler"
    config = compose_config(["algorithm=sft", f"{scheduler}.lr_decay_style=cosine", f"{scheduler}.lr_decay_iters=40"])
    check_total_steps(config, 21)
    assert not caplog.records
    check_total_steps(config, 20)
    assert "lr_decay_iters = 40: the run has 20 optimizer steps" in caplog.text
