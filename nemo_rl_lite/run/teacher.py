"""The folder of a run's teacher, and whether its tokens are the policy's."""

from dataclasses import replace
from pathlib import Path

from nemo_rl_lite.config.algorithms import has_teacher
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.teacher import as_teacher
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.rules.algorithm import TEACHER, with_teachers_keys
from nemo_rl_lite.run.model import starting_model


def with_teacher(config: Config, console: RunConsole, untrained: Path | None = None) -> Config:
    """Return the configuration with the folder of the teacher in `teacher.model_name`; it is made or downloaded where
    it does not exist. Without a teacher, the configuration is the same.

    Raises:
        ConfigError: what `starting_model` finds, under the teacher's keys.
    """
    if not has_teacher(config):
        return config
    try:
        folder = starting_model(as_teacher(config), console, untrained)
    except ConfigError as error:
        raise ConfigError(with_teachers_keys(error.violations)) from None
    return replace(config, teacher=replace(config.teacher, model_name=str(folder)))


def check_same_tokens(policy: ChatTokenizer, config: Config) -> None:
    """Check that the teacher, whose folder is known, reads the policy's token ids as the policy writes them.

    Raises:
        ConfigError: its tokenizer cannot be read, or gives one of the policy's tokens another id.
    """
    name = config.teacher.model_name
    try:
        others = ChatTokenizer(Path(str(name))).vocabulary
    except ConfigError as error:
        raise ConfigError(with_teachers_keys(error.violations)) from None
    own = policy.vocabulary
    unlike = sorted(((token, text) for text, token in own.items() if others.get(text) != token), key=lambda one: one[0])
    if unlike:
        token, text = unlike[0]
        there = f"{others[text]} there" if text in others else "not there"
        rule = f"{len(unlike)} of the policy's {len(own)} tokens have other ids in the teacher: {text!r} is {token} in "
        rule += f"policy.model_name and {there}"
        raise ConfigError([Violation(TEACHER, name, rule, "a teacher of the policy's family, with the same tokenizer")])
