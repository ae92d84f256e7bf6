"""The folder of the model that a run starts from, checked against the configuration."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from nemo_rl_lite.config.keys import RUN_FOLDER
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.models.folder import check_model_folder
from nemo_rl_lite.models.shape import NoModelError, is_hub_name
from nemo_rl_lite.models.source import locate_model
from nemo_rl_lite.models.templated import TEMPLATE_FILE, TEMPLATED, with_template
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.rules import check_rules


def starting_model(config: Config, console: RunConsole, untrained: Path | None = None) -> Path:
    """Find the model's folder; make or download it where it does not exist. With `untrained`, `locate_model` trains
    nothing.

    Raises:
        ConfigError: the hub cannot be reached or has no such model; the model is broken, or does not fit the
            configuration.
    """
    was_unknown = is_hub_name(config.policy.model_name)
    folder = locate_model(config, console, untrained)
    try:
        check_model_folder(folder)
    except NoModelError as error:
        fix = "correct the file, or copy the model's folder again"
        raise ConfigError([Violation("policy.model_name", config.policy.model_name, str(error), fix)]) from None
    if was_unknown:
        # The rules could not see the shape of a model on the hub before it was downloaded.
        local = dataclasses.replace(config, policy=dataclasses.replace(config.policy, model_name=str(folder)))
        violations = check_rules(local)
        if violations:
            raise ConfigError(violations)
    return folder


def with_chosen_template(config: Config, model: Path, run_folder: Path, say: Callable[[str], None]) -> Path:
    """Return the model's folder, or where `policy.tokenizer.chat_template` names a file, one in the run's folder that
    has this template: everything that reads the model, and what is exported, has it from there.

    Raises:
        ConfigError: the run's folder has another folder of that name.
    """
    key, template = "policy.tokenizer.chat_template", config.policy.tokenizer.chat_template
    if template is None:
        return model
    own, given = run_folder / TEMPLATED, Path(template).expanduser()
    if (own / TEMPLATE_FILE).exists() and (own / TEMPLATE_FILE).read_text() != given.read_text():
        say(f"{given} is another chat template than the one that this run had so far ({key})")
    try:
        return with_template(model, given, own)
    except NoModelError as error:
        raise ConfigError([Violation(key, template, str(error), f"another {RUN_FOLDER}, or move it away")]) from None
