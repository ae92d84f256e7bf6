"""Rules about profiled steps."""

from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule


@rule("profile.steps", "algorithm.max_num_steps")
def profiled_steps_are_taken(config: Config) -> Iterator[Violation]:
    steps, last = config.profile.steps, config.algorithm.max_num_steps
    beyond = [step for step in steps if last is not None and step > last]
    if beyond:
        rule_text = f"step {max(beyond)} is after the run's last, which is {last}"
        yield Violation("profile.steps", steps, rule_text, f"steps from 1 to {last}")
