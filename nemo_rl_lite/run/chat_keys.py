"""How the chats of a model are written that answers without training: by the chat template of its folder, or by what a
command names in its place."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rl_lite.config.keys import lay_over
from nemo_rl_lite.config.overrides import check_overrides, given_keys
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.rules.base import is_of
from nemo_rl_lite.rules.compose import resolve

CHAT_KEYS = ("policy.tokenizer.chat_template", "policy.tokenizer.chat_template_kwargs")
"""They mean what they mean for a run, and are those of a command for a run's model as for that of a folder."""


def chat_tokenizer(folder: Path, config: Config) -> ChatTokenizer:
    """The tokenizer of a model's folder, with the chat template that the configuration names, if any.

    Raises:
        ConfigError: the folder's tokenizer or the chat template cannot be used.
    """
    given = config.policy.tokenizer
    return ChatTokenizer(folder, given.chat_template_kwargs, given.chat_template)


def with_chat_keys(config: Config, arguments: Sequence[str]) -> Config:
    """Lay a command's overrides, which may set `CHAT_KEYS`, over a configuration.

    Raises:
        ConfigError: listing every override that cannot be, sets another key, or names a template that cannot be used.
    """
    overrides, violations = check_overrides(arguments)
    given = given_keys(overrides)
    for key in given:
        if not is_of(key, CHAT_KEYS):
            rule = f"changes nothing here: of the configuration, chats read {' and '.join(CHAT_KEYS)}"
            violations.append(Violation(key, None, rule, f"leave {key} out"))
    if violations:
        raise ConfigError(violations)
    if not given:
        return config
    composed = lay_over(OmegaConf.create(as_composed(config)), overrides)
    return resolve(composed, matters=lambda broken: broken.key in given)


def as_composed(config: Config) -> dict[str, Any]:
    """Return a configuration as mappings that overrides can be laid over. Its texts are whole, and nothing in them is
    filled in a second time."""
    return json.loads(json.dumps(asdict(config)).replace("${", "\\\\${"))
