import logging

import pytest

from nemo_rl_lite.data.problems import FileSet, Problem, chat
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.rollout.sampler import fitting_prompts
from nemo_rl_lite.validation.compose import compose_config


class Letters:
    """One token a letter."""

    def prompt(self, messages, tools=()):
        return list(messages[-1]["content"])


def problems(*lengths: int) -> tuple[Problem, ...]:
    return tuple(Problem(chat("x" * length), str(length)) for length in lengths)


def fit(training, validation, too_long):
    room = ["policy.max_total_sequence_length=20", "generation.max_new_tokens=10"]
    config = compose_config([f"data.too_long={too_long}", *room])
    return fitting_prompts(FileSet(training, seed=0, shuffle=False), validation, Letters(), config)


def test_long_prompts_are_an_error_that_names_both_limits():
    message = (
        r"11 tokens and generation.max_new_tokens = 10 exceed policy.max_total_sequence_length = 20.*data.too_long="
    )
    with pytest.raises(DataError, match=message):
        fit(problems(3, 11), [], "error")
    with pytest.raises(DataError, match=message):
        fit(problems(3), problems(11), "error")
    training, validation = fit(problems(3, 10), problems(10), "error")
    assert len(training.finite()) == 2 and len(validation) == 1


def test_long_prompts_are_dropped_and_counted(caplog):
    with caplog.at_level(logging.WARNING):
        training, validation = fit(problems(3, 11, 10, 12, 4), problems(30, 2), "drop")
    assert [training.problem(position).answer for position in range(4)] == ["3", "10", "4", "3"]
    assert [problem.answer for problem in validation] == ["2"]
    assert "2 of 5 training problems dropped: their prompts exceed 10 tokens" in caplog.text
    assert "1 of 2 validation problems dropped" in caplog.text


def test_nothing_left_is_an_error():
    with pytest.raises(DataError, match="all 2 training prompts exceed 10 tokens"):
        fit(problems(11, 12), [], "drop")
    with pytest.raises(DataError, match="all 1 validation prompts exceed 10 tokens"):
        fit(problems(3), problems(12), "drop")
