"""Rules about checkpoints."""

from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule


@rule("checkpoint.must_save_by", "checkpoint.save_period")
def a_limit_needs_checkpoints(config: Config) -> Iterator[Violation]:
    options, key = config.checkpoint, "checkpoint.must_save_by"
    if options.must_save_by is not None and not options.save_period:
        rule_text = "is when to save and stop, and checkpoint.save_period = 0 saves nothing"
        yield Violation(key, options.must_save_by, rule_text, f"checkpoint.save_period=10, or {key}=null")


@rule("checkpoint.must_save_by")
def a_limit_leaves_time(config: Config) -> Iterator[Violation]:
    limit, key = config.checkpoint.must_save_by, "checkpoint.must_save_by"
    if isinstance(limit, str) and not limit.strip("0:"):
        yield Violation(key, limit, "leaves no time for a step", f"{key}=3:50:00")
