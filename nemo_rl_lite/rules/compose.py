"""Hydra's composed configuration -> a validated `Config`, and readable errors for everything that is wrong with it.

Hydra composes, pydantic checks types and ranges, `rules/` checks what fields mean together. Every violation is
reported at once, before anything heavy is imported.
"""

import copy
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_lite.config.keys import compose_files, groups, known_keys, unknown_key
from nemo_rl_lite.config.overrides import check_overrides, given_keys
from nemo_rl_lite.config.schema import DOTTED_PATH, DURATION, RUN_NAME, Config
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.rules import check_rules
from nemo_rl_lite.rules.without_effect import keys_without_effect


def compose_command(arguments: Sequence[str]) -> Config:
    """Compose and validate the configuration of a user's command.

    Raises:
        ConfigError: listing what `compose_config` does, and every key of the command that changes nothing.
    """
    return compose_config(arguments, given_keys(arguments))


def compose_config(arguments: Sequence[str] = (), given: Sequence[str] = ()) -> Config:
    """Compose and validate the configuration that command-line arguments such as `policy.precision=bfloat16` describe.
    Keys and groups of `given` must have an effect.

    Raises:
        ConfigError: listing every violation: of the arguments, of types and ranges, of the rules.
    """
    overrides, violations = check_overrides(arguments)
    try:
        config = resolve(compose_files(overrides), given)
    except ConfigError as error:
        raise ConfigError([*violations, *error.violations]) from None
    if violations:
        raise ConfigError(violations)
    return config


def resolve(composed: DictConfig, given: Sequence[str] = ()) -> Config:
    """Turn Hydra's composed configuration into a typed, frozen `Config`. Keys and groups of `given` must have an
    effect.

    Raises:
        ConfigError: listing every unknown key, wrong type and broken rule, and every given key without effect.
    """
    values, violations = _plain(composed)
    config, type_violations = _validate(values)
    violations += type_violations
    unusable = frozenset(violation.key for violation in violations)
    if config is None:
        # Rules still speak about the keys that are fine: put defaults in place of those that are not.
        config, _ = _validate(_with_defaults(values, unusable))
    if config is not None:
        violations += check_rules(config, unusable)
        defaults, reported = _defaults(_algorithm_file(values)), {violation.key for violation in violations}
        changing = [key for key in given if key not in reported and _at(values, key) != _at(defaults, key)]
        violations += keys_without_effect(config, changing)
    if violations or config is None:
        raise ConfigError(violations)
    return config


def restore(text: str) -> Config:
    """A configuration that a run has written down (JSON).

    Raises:
        ConfigError: it is of another version of this package.
    """
    try:
        return TypeAdapter(Config).validate_json(text)
    except ValidationError as error:
        raise ConfigError([_describe(details, known_keys()) for details in error.errors(include_url=False)]) from None


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


# Stands for a value already reported, so that it is not reported twice.
_UNUSABLE = "\0unusable"


def _validate(values: dict[str, Any]) -> tuple[Config | None, list[Violation]]:
    try:
        # As JSON, because strict mode takes mappings for dataclasses only from there.
        return TypeAdapter(Config).validate_json(json.dumps(values)), []
    except ValidationError as error:
        errors = [details for details in error.errors(include_url=False) if not _is_reported(details)]
        known = known_keys(_algorithm_file(values))
        return None, _merged([_describe(details, known) for details in errors])


def _merged(violations: Sequence[Violation]) -> list[Violation]:
    """One violation a key: where a value may be of several types, pydantic reports each that it is not."""
    merged: dict[str, Violation] = {}
    for one in violations:
        first = merged.get(one.key)
        rule = one.rule if first is None else f"{first.rule}, or {one.rule.removeprefix('must be ')}"
        fix = one.fix if first is None else f"set {one.key} to one of these"
        merged[one.key] = Violation(one.key, one.value, rule, fix)
    return list(merged.values())


def _is_reported(details: ErrorDetails) -> bool:
    given = details["input"]
    return given == _UNUSABLE or (_is_of_variant(details) and given.get("name") == _UNUSABLE)


def _is_of_variant(details: ErrorDetails) -> bool:
    """Whether the error is that no variant of a section is named."""
    return details["type"].startswith("union_tag")


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


_EXPECTED = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "dataclass_type": "must be a mapping",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}
_FILES = ("data.train_path", "data.validation_path")
# What a pattern of the schema stands for.
_PATTERNS = {
    RUN_NAME: "must be the name of a folder: at most 200 letters, no slash, and no space or dot in front",
    DOTTED_PATH: "must be a dotted path, such as package.module.Class",
    DURATION: "must be a duration: [[days:]hours:]minutes:seconds",
}


def _describe(details: ErrorDetails, known: Sequence[str]) -> Violation:
    location = [str(part) for part in details["loc"]]
    if location[0] == "algorithm":
        del location[1:2]  # pydantic's name of the variant
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    if kind not in ("unexpected_keyword_argument", "missing") and ".".join(location) not in known:
        # pydantic adds the name of the type that the value might have had.
        location = location[:-1] if ".".join(location[:-1]) in known and not location[-1].isdigit() else location
    key = ".".join(location)
    if _is_of_variant(details):
        fix = " or ".join(f"algorithm={file}" for file in groups()["algorithm"])
        return Violation(f"{key}.name", given.get("name"), "no such algorithm", fix)
    if kind == "unexpected_keyword_argument":
        return unknown_key(key, given, known)
    if kind == "missing":
        return Violation(key, None, "has no value", f"set it: {key}=...")
    rule = _EXPECTED.get(kind) or _PATTERNS.get(context.get("pattern", ""))
    rule = rule or details["msg"].replace("Input should be", "must be")
    expected = context.get("expected")
    if kind == "string_type" and key in _FILES:
        return Violation(key, given, "must be the name of a file", f"{key}='data/*.jsonl' for several")
    fix = f"choose one of: {expected}" if expected else f"set {key} to a value that {_is(rule)}"
    return Violation(key, given, rule, f"set {key} to such a value" if "pattern" in context else fix)


def _is(rule: str) -> str:
    return rule.replace("must be", "is", 1).replace("must not be", "is not", 1)
