import pytest

from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rewards.registry import find_reward


def shout(response: str, answer: str, volume: float = 1.0) -> float:
    """A user's own reward."""
    return volume * (response == answer.upper())


def test_arguments_that_the_reward_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="unexpected keyword argument 'loudness'"):
        find_reward("tests.unit.test_rewards.shout", {"loudness": 3})


def test_exact_match():
    reward = find_reward("exact_match", {})
    assert reward(" 42\n", "42") == 1.0
    assert reward("42.", "42") == 0.0


def test_a_users_own_reward_by_dotted_path():
    reward = find_reward("tests.unit.test_rewards.shout", {"volume": 3})
    assert reward("HI", "hi") == 3.0
    assert isinstance(reward("x", "y"), float)


@pytest.mark.parametrize(
    "name", ["tests.unit.test_rewards.absent", "no_such_module.function", "tests.unit.test_rewards.__name__"]
)
def test_rewards_that_cannot_be_imported(name):
    with pytest.raises(ConfigError, match=r"reward\.name"):
        find_reward(name, {})
