"""Environment variables that `configs/` reads, as `${oc.env:NAME,default}`."""

import os
import re
from functools import cache

from omegaconf import DictConfig, OmegaConf

from nemo_rl_lite.config.keys import config_dir

_REFERENCE = re.compile(r"\boc\.env:(\w+)")
# All variables of this beginning are this launcher's.
_OWN = "NRL_REFIT_"


def variables_of(composed: DictConfig, key: str) -> list[str]:
    """Return the variables of this environment that the value of a key refers to."""
    value = OmegaConf.to_container(composed, resolve=False)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return [name for name in _REFERENCE.findall(str(value)) if name in os.environ]


def unread_variables() -> list[str]:
    """Return the variables of this environment that look like one of `configs/`, and that none reads."""
    return sorted(name for name in os.environ if name.startswith(_OWN) and name not in known_variables())


@cache
def known_variables() -> frozenset[str]:
    """Return the variables that the files of `configs/` refer to."""
    return frozenset(name for file in config_dir().rglob("*.yaml") for name in _REFERENCE.findall(file.read_text()))
