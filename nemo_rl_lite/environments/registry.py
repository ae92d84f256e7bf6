"""Find an environment by a name from here, by a dotted path, or by file."""

from collections.abc import Callable

from nemo_rl_lite.config.sections.data import EnvironmentConfig
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.tools import Tool, callable_tools
from nemo_rl_lite.environments.interface import Environment
from nemo_rl_lite.errors import ConfigError, Violation

ENVIRONMENTS = {
    "calculator": "nemo_rl_lite.environments.calculator.Calculator",
    "tools": "nemo_rl_lite.environments.tools.Functions",
    "python": "nemo_rl_lite.environments.python.Python",
    "nemo_gym": "nemo_rl_lite.environments.nemo_gym.NeMoGym",
    "verifiers": "nemo_rl_lite.environments.verifiers.Verifiers",
}


# These answer at once, and need no process of their own.
INSTANT = frozenset({"calculator"})


def find_environment(name: str) -> Callable[..., Environment]:
    """Return the class of an environment: one of `ENVIRONMENTS`, or a user's (see `imported`). Raises what its import
    raises."""
    return imported(ENVIRONMENTS.get(name, name))


def check_environment(config: EnvironmentConfig) -> tuple[Tool, ...]:
    """Make an environment of the configured class, as each episode will, let it check what it needs, and return the
    tools that it offers.

    Raises:
        ConfigError: there is no such class, or it cannot be made with `environment.kwargs`, or its tools are no tools.
    """
    if config.name is None:
        return ()
    try:
        kind = find_environment(config.name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        own = "package.module.Class or path/to/file.py:Class that can be imported"
        fix = f"choose one of {', '.join(ENVIRONMENTS)}, or give {own}"
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError([Violation("environment.name", config.name, rule, fix)]) from error
    try:
        environment = kind(**config.kwargs)
        getattr(environment, "check", lambda: None)()
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise ConfigError([_cannot_be_made(config, f"{type(error).__name__}: {error}")]) from error
    try:
        tools = callable_tools(getattr(environment, "tools", ()), "its attribute `tools`")
    except (Exception, SystemExit) as error:  # it may be a user's property
        fix = "correct them: docs/extending.md#a-tool has an example"
        raise ConfigError(
            [Violation("environment.name", config.name, f"offers no usable tools: {error}", fix)]
        ) from error
    if not callable(getattr(environment, "step", None)):
        rule, fix = "has no method step(problem, conversation)", "see nemo_rl_lite/environments/interface.py"
        raise ConfigError([Violation("environment.name", config.name, rule, fix)])
    return tools


def _cannot_be_made(config: EnvironmentConfig, error: str) -> Violation:
    if config.kwargs:
        rule, fix = f"{config.name} cannot be made with them: {error}", "correct them, or the class"
        return Violation("environment.kwargs", dict(config.kwargs), rule, fix)
    fix = "give the arguments that it needs, +environment.kwargs.NAME=VALUE, or correct the class"
    return Violation("environment.name", config.name, f"cannot be made without arguments: {error}", fix)
