"""The rules about a run's steps, asked again where the data says how many there are."""

import dataclasses

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rules.algorithm import patience_has_validations
from nemo_rl_lite.rules.profile import profiled_steps_are_taken


def check_total_steps(config: Config, total: int) -> None:
    """Raise ConfigError where a run that ends after `total` steps, by its epochs, cannot do what its keys say."""
    options = dataclasses.replace(config.algorithm, max_num_steps=total)
    whole = dataclasses.replace(config, algorithm=options)
    if violations := [*profiled_steps_are_taken(whole), *patience_has_validations(whole)]:
        raise ConfigError(violations)
