"""Where metrics go."""

import netrc
import os
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_lite.config.rules.base import rule
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation


@rule("logger.wandb_enabled", "logger.wandb.mode")
def wandb_can_log_in(config: Config) -> Iterator[Violation]:
    if config.logger.wandb_enabled and config.logger.wandb.mode == "online" and not _wandb_key():
        rule_text = "W&B has no API key on this machine"
        fix = "run `wandb login`, set WANDB_API_KEY, or logger.wandb.mode=offline"
        yield Violation("logger.wandb.mode", "online", rule_text, fix)


def _wandb_key() -> bool:
    # A server of one's own may need no key, or one that is kept elsewhere; its client will say.
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_BASE_URL"):
        return True
    try:
        hosts = netrc.netrc(str(Path("~/.netrc").expanduser())).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)
