"""Hydra's composed configuration -> a validated `Config`, and readable errors for everything that is wrong with it.

Hydra composes, pydantic checks types and ranges, `rules/` checks what fields mean together. Every violation is
reported at once, before anything heavy is imported.
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_lite.config.keys import compose_files, groups, known_keys
from nemo_rl_lite.config.leaves import leaves
from nemo_rl_lite.config.overrides import check_overrides
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.variables import variables_of
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.rules import check_rules
from nemo_rl_lite.rules.defaults import register_defaults
from nemo_rl_lite.rules.type_errors import described, is_of_variant, merged

register_defaults()


def compose_command(arguments: Sequence[str]) -> Config:
    """Compose and validate the configuration of a user's command.

    Raises:
        ConfigError: listing what `compose_config` does.
    """
    return compose_config(arguments)


def compose_config(arguments: Sequence[str] = ()) -> Config:
    """Compose and validate the configuration that command-line arguments such as `policy.precision=bfloat16` describe.

    Raises:
        ConfigError: listing every violation: of the arguments, of types and ranges, of the rules.
    """
    overrides, violations = check_overrides(arguments)
    try:
        config = resolve(compose_files(overrides))
    except ConfigError as error:
        raise ConfigError([*violations, *error.violations]) from None
    if violations:
        raise ConfigError(violations)
    return config


def resolve(composed: DictConfig, matters: Callable[[Violation], bool] = lambda _: True) -> Config:
    """Turn Hydra's composed configuration into a typed, frozen `Config`. Broken rules count where they `matter`.

    Raises:
        ConfigError: listing every unknown key, wrong type and broken rule.
    """
    values, violations = _plain(composed)
    config, type_violations = _validate(values)
    violations = [_naming_its_variable(one, composed) for one in (*violations, *type_violations)]
    unusable = frozenset(violation.key for violation in violations)
    if config is None:
        # Rules still speak about the keys that are fine: put defaults in place of those that are not.
        config, _ = _validate(_with_defaults(values, unusable))
    if config is not None:
        violations += filter(matters, check_rules(config, unusable))
    if violations or config is None:
        raise ConfigError(_without_followers(violations, composed))
    return config


def _without_followers(violations: Sequence[Violation], composed: DictConfig) -> list[Violation]:
    """Leave out problems of keys whose value follows from another key that has a problem."""
    raw, keys = OmegaConf.to_container(composed, resolve=False), {one.key for one in violations}
    sources = {one.key: str(_at(raw, one.key)) for one in violations}
    return [one for one in violations if not any(f"${{{key}}}" in sources[one.key] for key in keys)]


def default_values(algorithm: str) -> dict[str, Any]:
    """The configuration of this algorithm and nothing else, which may lack what a command must give."""
    return copy.deepcopy(_defaults((f"algorithm={algorithm}",)))


def changed_keys(config: Config) -> list[str]:
    """The keys whose values are not the defaults of the configuration's algorithm."""
    defaults = dict(leaves(default_values(config.algorithm.name)))
    return [key for key, value in leaves(dataclasses.asdict(config)) if defaults.get(key) != value]


def restore(text: str) -> Config:
    """A configuration that a run has written down (JSON).

    Raises:
        ConfigError: it is of another version of this package.
    """
    try:
        return TypeAdapter(Config).validate_json(text)
    except ValidationError as error:
        raise ConfigError([described(details, known_keys()) for details in error.errors(include_url=False)]) from None


def _plain(composed: DictConfig) -> tuple[dict[str, Any], list[Violation]]:
    """Resolve interpolations leaf by leaf, so that one that fails does not hide the others."""
    violations: list[Violation] = []

    def visit(node: Any, prefix: str) -> Any:
        if not isinstance(node, DictConfig):
            return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        plain = {}
        for name in node:
            path = f"{prefix}{name}"
            try:
                if OmegaConf.is_missing(node, name):
                    violations.append(Violation(path, None, "has no value", f"set it: {path}=..."))
                    plain[name] = _UNUSABLE
                    continue
                plain[name] = visit(node[name], f"{path}.")
            except (OmegaConfBaseException, HydraException, ValueError, RecursionError) as error:
                cause = next(iter(str(error).splitlines()), type(error).__name__)
                rule = f"cannot be resolved: {cause}"
                violations.append(Violation(path, None, rule, "correct the value or the variable it refers to"))
                plain[name] = _UNUSABLE
        return plain

    return visit(composed, ""), violations


def _naming_its_variable(one: Violation, composed: DictConfig) -> Violation:
    names = variables_of(composed, one.key)
    fix = f"correct the environment variable {' or '.join(names)}, or unset it"
    return Violation(one.key, one.value, one.rule, fix) if names else one


# Stands for a value already reported, so that it is not reported twice.
_UNUSABLE = "\0unusable"


def _validate(values: dict[str, Any]) -> tuple[Config | None, list[Violation]]:
    try:
        # As JSON, because strict mode takes mappings for dataclasses only from there.
        return TypeAdapter(Config).validate_json(json.dumps(values)), []
    except ValidationError as error:
        errors = [details for details in error.errors(include_url=False) if not _is_reported(details)]
        known = known_keys(_algorithm_file(values))
        return None, merged([described(details, known) for details in errors])


def _is_reported(details: ErrorDetails) -> bool:
    given = details["input"]
    return given == _UNUSABLE or (is_of_variant(details) and given.get("name") == _UNUSABLE)


def _algorithm_file(values: dict[str, Any]) -> tuple[str, ...]:
    """The choice of file that the values' algorithm comes from."""
    name = _at(values, "algorithm.name")
    return (f"algorithm={name}",) if name in groups()["algorithm"] else ()


def _with_defaults(values: dict[str, Any], unusable: frozenset[str]) -> dict[str, Any]:
    """A copy of `values` in which the keys of `unusable` have their default, or are gone where they have none."""
    repaired, defaults = copy.deepcopy(values), _defaults(_algorithm_file(values))
    for key in unusable:
        section, _, name = key.rpartition(".")
        parent, default_parent = _at(repaired, section), _at(defaults, section)
        if isinstance(parent, dict):
            parent.pop(name, None)
            if isinstance(default_parent, dict) and default_parent.get(name, _UNUSABLE) != _UNUSABLE:
                parent[name] = default_parent[name]
    return repaired


@cache
def _defaults(algorithm_file: tuple[str, ...]) -> dict[str, Any]:
    return _plain(compose_files(algorithm_file))[0]


def _at(node: Any, path: str) -> Any:
    """The node at a dotted path, or None."""
    for name in path.split(".") if path else ():
        node = node.get(name) if isinstance(node, dict) else None
    return node
