"""Hydra's composed configuration -> a validated `Config`, and readable errors for everything that is wrong with it.

Hydra composes, pydantic checks types and ranges, `rules/` checks what fields mean together. Every violation is
reported at once, before anything heavy is imported.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_lite.config.keys import DEFAULT_ALGORITHM, compose_files, groups, known_keys, variables_of
from nemo_rl_lite.config.overrides import check_overrides
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.models.embedded.reverse_digits import NAME as EMBEDDED
from nemo_rl_lite.models.shape import NoModelError, read_model_shape
from nemo_rl_lite.rules.base import check_rules
from nemo_rl_lite.rules.type_errors import described, is_of_variant, merged


def _default_length(model: object, of_the_embedded: int, most: int) -> int:
    """`${default_length:MODEL,A,B}`: A tokens for the embedded model, for others B or all their positions."""
    if model == EMBEDDED:
        return of_the_embedded
    try:
        shape = read_model_shape(str(model))
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError):
        # A rule reports it.
        return most
    # The shape of a hub model may not be known yet.
    return min(most, shape.max_positions) if shape else most


def _default_response(model: object, of_the_embedded: int, most: int, length: object) -> int:
    """`${default_response:MODEL,A,B,LENGTH}`: A tokens for the embedded model, for others B or half of LENGTH."""
    return of_the_embedded if model == EMBEDDED else max(1, min(most, _tokens(length, 2 * most) // 2))


def _default_micro_batch(model: object, of_the_embedded: int, tokens: int, length: object) -> int:
    """`${default_micro_batch:MODEL,A,B,LENGTH}`: A sequences, for other models as many of LENGTH as have B tokens."""
    return of_the_embedded if model == EMBEDDED else max(1, tokens // _tokens(length, tokens))


def _default_rate(model: object, of_the_embedded: float, of_others: float, trains_adapters: object) -> float:
    """`${default_rate:MODEL,A,B,LORA}`: A for the embedded model and for LoRA, B for all weights of other models."""
    return of_the_embedded if model == EMBEDDED or trains_adapters is True else of_others


def _tokens(length: object, otherwise: int) -> int:
    """Return the length; `otherwise` if it is no number of tokens, which is reported as an error of its key."""
    return length if isinstance(length, int) and length > 0 else otherwise


for _resolver in (_default_length, _default_response, _default_micro_batch, _default_rate):
    OmegaConf.register_new_resolver(_resolver.__name__.removeprefix("_"), _resolver, replace=True)


def compose_config(arguments: Sequence[str] = ()) -> Config:
    """Compose and validate the configuration that command-line arguments such as `policy.precision=bfloat16` describe.

    Raises:
        ConfigError: listing every violation: of the arguments, of types and ranges, of the rules.
    """
    overrides, violations = check_overrides(arguments)
    if violations and not overrides:
        # The defaults are valid.
        raise ConfigError(violations)
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
        keys = {one.key for one in violations}
        # What follows from a wrong value is no problem of its own.
        raise ConfigError([one for one in violations if keys.isdisjoint(_references(composed, one.key))])
    return config


def default_values(algorithm: str) -> dict[str, Any]:
    """The configuration of this algorithm and nothing else, which may lack what a command must give."""
    return copy.deepcopy(_defaults(algorithm))


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


def _references(composed: DictConfig, key: str) -> Iterator[str]:
    """Yield the keys that the value of a key is made from."""
    value = _at(OmegaConf.to_container(composed, resolve=False), key)
    for name in re.findall(r"\$\{([.\w]+)\}", value) if isinstance(value, str) else ():
        above = len(name) - len(name.lstrip("."))
        yield ".".join([*(key.split(".")[:-above] if above else []), name.lstrip(".")])


# Stands for a value already reported, so that it is not reported twice.
_UNUSABLE = "\0unusable"


def _validate(values: dict[str, Any]) -> tuple[Config | None, list[Violation]]:
    try:
        # As JSON, because strict mode takes mappings for dataclasses only from there.
        return TypeAdapter(Config).validate_json(json.dumps(values)), []
    except ValidationError as error:
        errors = [details for details in error.errors(include_url=False) if not _is_reported(details)]
        return None, merged([described(details, known_keys(), _algorithm(values)) for details in errors])


def _is_reported(details: ErrorDetails) -> bool:
    given = details["input"]
    return given == _UNUSABLE or (is_of_variant(details) and given.get("name") == _UNUSABLE)


def _algorithm(values: dict[str, Any]) -> str:
    name = _at(values, "algorithm.name")
    return name if name in groups()["algorithm"] else DEFAULT_ALGORITHM


def _with_defaults(values: dict[str, Any], unusable: frozenset[str]) -> dict[str, Any]:
    """A copy of `values` in which the keys of `unusable` have their default, or are gone where they have none."""
    repaired, defaults = copy.deepcopy(values), _defaults(_algorithm(values))
    for key in unusable:
        section, _, name = key.rpartition(".")
        parent, default_parent = _at(repaired, section), _at(defaults, section)
        if isinstance(parent, dict):
            parent.pop(name, None)
            if isinstance(default_parent, dict) and default_parent.get(name, _UNUSABLE) != _UNUSABLE:
                parent[name] = default_parent[name]
    return repaired


@cache
def _defaults(algorithm: str) -> dict[str, Any]:
    return _plain(compose_files([f"algorithm={algorithm}"]))[0]


def _at(node: Any, path: str) -> Any:
    """The node at a dotted path, or None."""
    for name in path.split(".") if path else ():
        node = node.get(name) if isinstance(node, dict) else None
    return node
