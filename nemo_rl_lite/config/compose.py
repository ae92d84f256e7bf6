"""Hydra's composed configuration -> a validated `Config`, and readable errors for everything that is wrong with it.

Hydra composes, pydantic checks types and ranges, `rules.py` checks what fields mean together. Every violation is
reported at once, before anything heavy is imported.
"""

import copy
import difflib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_lite.config.rules import check_rules
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, Violation

CONFIG_NAME = "train"
HYDRA_PACKAGE = "hydra"


def config_dir() -> Path:
    """The folder of YAML groups: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def compose_config(arguments: Sequence[str] = ()) -> Config:
    """Compose and validate the configuration that command-line arguments such as `policy.precision=bfloat16` describe.

    Raises:
        ConfigError: listing every violation: of the arguments, of types and ranges, of the rules.
    """
    overrides, violations = check_overrides(arguments)
    try:
        config = resolve(_compose(overrides))
    except ConfigError as error:
        raise ConfigError([*violations, *error.violations]) from None
    if violations:
        raise ConfigError(violations)
    return config


def resolve(composed: DictConfig) -> Config:
    """Turn Hydra's composed configuration into a typed, frozen `Config`.

    Raises:
        ConfigError: listing every unknown key, wrong type and broken rule.
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
    if violations or config is None:
        raise ConfigError(violations)
    return config


def check_overrides(arguments: Sequence[str]) -> tuple[list[str], list[Violation]]:
    """Split the command line's overrides into those Hydra can take, in order, and what is wrong with the others.

    `+key=value` becomes `key=value` where the key exists, and the reverse where it does not and the section is open. An
    unknown key, group or file is answered with the nearest known one.
    """
    violations: list[Violation] = []
    accepted: list[str] = []
    for argument in arguments:
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:
            fix = "write key.path=value or group=file; quote a value with unusual letters: \"key.path='value'\""
            violations.append(Violation(argument, None, "is not an override", fix))
            continue
        problem = _override_problem(override)
        if problem:
            violations.append(problem)
        elif override.key_or_group != "recipes" or override.value() is not None:
            accepted.append(_as_hydra_takes_it(argument, override.key_or_group))
    return accepted, violations


@cache
def groups() -> dict[str, list[str]]:
    """Group -> its files' names."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(config_dir().iterdir())
        if folder.is_dir()
    }


@cache
def known_keys() -> list[str]:
    """Every key path of the default configuration, sections included."""
    return list(_paths(OmegaConf.to_container(_compose([]), resolve=False)))


def nearest_key(key: str, known: Sequence[str] | None = None) -> str | None:
    """The known key a misspelt or misplaced one most likely means, or None."""
    known = known_keys() if known is None else known
    leaf = key.rsplit(".", maxsplit=1)[-1]
    same_leaf = [path for path in known if path.rsplit(".", maxsplit=1)[-1] == leaf]
    if same_leaf:
        return max(same_leaf, key=lambda path: difflib.SequenceMatcher(None, path, key).ratio())
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if close:
        return close[0]
    leaves = {path.rsplit(".", maxsplit=1)[-1]: path for path in known}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)
    return leaves[close[0]] if close else None


def _compose(overrides: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
        try:
            return compose(CONFIG_NAME, overrides=list(overrides))
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
            message = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError([Violation("the configuration", None, message, "see --help and --cfg job")]) from None


def _as_hydra_takes_it(argument: str, key: str) -> str:
    if key.startswith(HYDRA_PACKAGE):
        return argument
    is_open = any(f"{key}.".startswith(f"{section}.") for section in _OPEN_SECTIONS)
    return ("++" if is_open else "") + argument.lstrip("+")


def _override_problem(override: Override) -> Violation | None:
    key = override.key_or_group
    section = key.split(".")[0]
    if section == HYDRA_PACKAGE or section.startswith(f"{HYDRA_PACKAGE}/"):
        return None
    if override.package is not None:
        return Violation(override.input_line or key, None, "gives a package", "write key.path=value or group=file")
    if key in groups() and "." not in key:
        return _group_problem(override)
    if override.is_delete():
        return Violation(key, None, "deletes a key, and every key is needed", "set it to null where it may be empty")
    if _is_known_key(key):
        return None
    nearest = nearest_key(key)
    hint = f"did you mean {nearest}?" if nearest else "list the keys with --cfg job"
    return Violation(key, (override.input_line or "").partition("=")[2], "unknown key", hint)


def _group_problem(override: Override) -> Violation | None:
    group, choice = override.key_or_group, override.value()
    files = groups()[group]
    if isinstance(choice, Glob):
        return None
    choices = [str(element) for element in choice.list] if isinstance(choice, ChoiceSweep) else [choice]
    for name in choices:
        if name in files or (group == "recipes" and name is None):
            continue
        close = difflib.get_close_matches(str(name), files, n=1, cutoff=0.4)
        listing = ", ".join(files) or "none"
        hint = f"did you mean {group}={close[0]}? files: {listing}" if close else f"choose one of: {listing}"
        return Violation(group, name, f"no such file in the group '{group}'", hint)
    return None


def _is_known_key(key: str) -> bool:
    return key in known_keys() or any(key.startswith(f"{section}.") for section in _OPEN_SECTIONS)


# Sections whose keys belong to somebody else: a user's reward function, vLLM, a task's generator.
_OPEN_SECTIONS = ("reward.kwargs", "generation.vllm_kwargs", "data.task_kwargs")


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    if not isinstance(node, dict):
        return
    for name, child in node.items():
        yield f"{prefix}{name}"
        yield from _paths(child, f"{prefix}{name}.")


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
        return None, [_describe(e) for e in error.errors(include_url=False) if e["input"] != _UNUSABLE]


def _with_defaults(values: dict[str, Any], unusable: frozenset[str]) -> dict[str, Any]:
    """A copy of `values` in which the keys of `unusable` have their default, or are gone where they have none."""
    repaired = copy.deepcopy(values)
    defaults, _ = _plain(_compose([]))
    for key in unusable:
        section, _, name = key.rpartition(".")
        parent, default_parent = _at(repaired, section), _at(defaults, section)
        if isinstance(parent, dict):
            parent.pop(name, None)
            if isinstance(default_parent, dict) and default_parent.get(name, _UNUSABLE) != _UNUSABLE:
                parent[name] = default_parent[name]
    return repaired


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
}


def _describe(details: ErrorDetails) -> Violation:
    location = [str(part) for part in details["loc"]]
    key = ".".join(location)
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        siblings = [path for path in known_keys() if path.rpartition(".")[0] == key.rpartition(".")[0]]
        nearest = nearest_key(key, siblings) or nearest_key(key)
        return Violation(key, given, "unknown key", f"did you mean {nearest}?" if nearest else "remove it")
    if kind == "missing":
        return Violation(key, None, "has no value", f"set it: {key}=...")
    rule = _EXPECTED.get(kind) or details["msg"].replace("Input should be", "must be")
    expected = context.get("expected")
    fix = f"choose one of: {expected}" if expected else f"set {key} to a value that {rule.replace('must be', 'is')}"
    return Violation(key, given, rule, fix)
