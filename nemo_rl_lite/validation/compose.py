"""Compose and validate a configuration, and report all problems at once.

Hydra composes, pydantic checks types and ranges, the rules of this package check combinations. Imports nothing heavy.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import islice
from math import log2
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.config.composition import compose_files
from nemo_rl_lite.config.experiments import expanded, placed
from nemo_rl_lite.config.keys import (
    DEFAULT_ALGORITHM,
    earlier_keys,
    groups,
    known_keys,
    owners,
    unknown_key,
    variables_of,
)
from nemo_rl_lite.config.overrides import check_overrides
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import DURATION, RUN_NAME, SOURCE_NAME, USER_CODE, AlgorithmConfig
from nemo_rl_lite.config.sources import ONLY, of_source, source_configs
from nemo_rl_lite.data.rows import file_rows
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.models.embedded import NAME as EMBEDDED
from nemo_rl_lite.models.shape import known_shape

Check = Callable[[Config], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    reads: tuple[str, ...]
    check: Check
    options: type[AlgorithmConfig]
    of_sources: bool


RULES: list[Rule] = []


def rule(
    *reads: str, options: type[AlgorithmConfig] = AlgorithmConfig, of_sources: bool = False
) -> Callable[[Check], Check]:
    """Register a check for algorithms with these options. It is skipped if a key that it `reads` has a wrong type.
    `of_sources`: check each source of a mixture instead of the run."""

    def register(check: Check) -> Check:
        RULES.append(Rule(reads, check, options, of_sources))
        return check

    return register


def check_rules(config: Config, unusable: frozenset[str] = frozenset()) -> list[Violation]:
    """Return every violation. Rules that read a key of `unusable` are skipped."""
    sources = source_configs(config)
    return [
        of_source(name, violation)
        for rule in RULES
        if isinstance(config.algorithm, rule.options)
        and not any(is_of(bad, rule.reads) or is_of(read, [bad]) for bad in unusable for read in rule.reads)
        for name, one in (sources if rule.of_sources else {ONLY: config}).items()
        for violation in rule.check(one)
    ]


def is_of(key: str, names: Sequence[str]) -> bool:
    """Return whether `key` is one of `names`, or below one of them."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


# --- From a command line to a configuration

_SECTION = "must be a mapping"
_EXPECTED = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": _SECTION,
    "dataclass_type": _SECTION,
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}
_FILES = ("data.train_path", "data.validation_path")

# Keys of a source that are not keys of `data`.
_OF_SOURCE = ("reward", "environment", "agent", "teacher", "weight", "max_new_tokens")
_SECTIONS_IN_SOURCE = {
    "data": "leave the section out: SOURCE.KEY",
    "generation": "SOURCE.max_new_tokens; other keys of generation are the run's",
}

# Rules of the schema's patterns.
_PATTERNS = {
    RUN_NAME: "must be a folder name: at most 200 characters, no slash, no leading space or dot",
    USER_CODE: "must be a dotted path (package.module.Class) or a file (path/to/file.py:Class)",
    SOURCE_NAME: "must be a name: letters, digits, _ and - only",
    DURATION: "must be a duration: [[days:]hours:]minutes:seconds",
}


def described(details: ErrorDetails, known: Sequence[str], algorithm: str = DEFAULT_ALGORITHM) -> Violation:
    """Convert an error of pydantic to a violation. `known`: all keys."""
    location = [str(part) for part in details["loc"]]
    if location[:2] == ["data", "sources"] and len(location) > 2:
        return _described_source(details, known, algorithm)
    if location[0] == "algorithm":
        del location[1:2]  # pydantic's name of the variant
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    if kind not in ("unexpected_keyword_argument", "missing") and ".".join(location) not in known:
        # pydantic adds the name of a type that the value could have had.
        location = location[:-1] if ".".join(location[:-1]) in known and not location[-1].isdigit() else location
    key = ".".join(location)
    if is_of_variant(details):
        fix = " or ".join(f"algorithm={file}" for file in groups()["algorithm"])
        return Violation(f"{key}.name", given.get("name"), "no such algorithm", fix)
    if kind == "unexpected_keyword_argument":
        return unknown_key(key, given, algorithm)
    if kind == "missing":
        return Violation(key, None, "has no value", f"set it: {key}=...")
    rule = _EXPECTED.get(kind) or _PATTERNS.get(context.get("pattern", ""))
    rule = rule or details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    expected = context.get("expected")
    if kind == "string_type" and key in _FILES:
        return Violation(key, given, "must be a file name", f"{key}='data/*.jsonl' for several")
    if kind == "string_type" and key == "checkpoint.push_to_hub":
        return Violation(key, given, "must be the name of a repository", f"{key}=my-name/my-model, or null for none")
    if kind == "list_type" and isinstance(given, str):
        return Violation(key, given, rule, f"'{key}=[{given}]'")
    given = "null" if given is None else given
    if rule == _SECTION:
        return Violation(key, given, rule, f"{key}.NAME=..., one override for each of its keys")
    if expected:
        return Violation(key, given, rule, f"choose one of: {expected}")
    noun = rule.removeprefix("must be ").partition(":")[0]
    value = rule.replace("must be", "a value that is", 1).replace("must not be", "a value that is not", 1)
    return Violation(key, given, rule, f"set {key} to {noun if noun.startswith(('a ', 'an ', 'true')) else value}")


def _described_source(details: ErrorDetails, known: Sequence[str], algorithm: str) -> Violation:
    """Convert an error in a source of a mixture, whose keys are those of the run."""
    _, _, name, *own = details["loc"]
    source = f"data.sources.{name}"
    if own[:1] == ["weight"]:
        rule = "must be a number of at least 0, or map points of step or solve_rate to such numbers"
        given = None if {"step", "solve_rate"} & set(own) else details["input"]
        key = f"{source}.weight"
        return Violation(key, given, rule, f"{key}=2.0 or {key}.step={{0:1.0,100:0.2}}")
    if not own or own[0] in ("max_new_tokens", "teacher") or own in (["reward"], ["environment"], ["agent"]):
        # pydantic adds the name of a type that the value could have had.
        key = ".".join([source, *map(str, own if own[:1] == ["teacher"] else own[:1])])
        return replace(described({**details, "loc": (key,)}, (*known, key), algorithm), key=key)
    if details["type"] == "unexpected_keyword_argument" and len(own) == 1 and f"data.{own[0]}" not in known:
        near = "".join(f"did you mean SOURCE.{one}?" for one in get_close_matches(str(own[0]), _OF_SOURCE, n=1))
        if fix := _SECTIONS_IN_SOURCE.get(str(own[0]), near):
            return Violation(f"{source}.{own[0]}", details["input"], "unknown key", fix.replace("SOURCE", source))
    of_run = own if own[0] in ("reward", "environment", "agent") else ["data", *own]
    return of_source(str(name), described({**details, "loc": tuple(of_run)}, known, algorithm))


def merged(violations: Sequence[Violation]) -> list[Violation]:
    """Join violations of the same key: pydantic reports each alternative type separately."""
    found: dict[str, Violation] = {}
    for one in violations:
        first = found.get(one.key)
        if first is None or first.rule == one.rule:
            found[one.key] = one
            continue
        rule = f"{first.rule}, or {one.rule.removeprefix('must be ')}"
        found[one.key] = Violation(one.key, one.value, rule, f"set {one.key} to one of these")
    return list(found.values())


def is_of_variant(details: ErrorDetails) -> bool:
    """Return whether the error is a missing or unknown algorithm."""
    return details["type"].startswith("union_tag")


def _default_length(model: object, of_the_embedded: int, most: int) -> int:
    """Resolve `${default_length:MODEL,A,B}`: A for the embedded model, else B or the model's positions if fewer."""
    if model == EMBEDDED:
        return of_the_embedded
    # A hub model may not be downloaded yet, and `check_model` reports one that is not whole.
    shape = known_shape(str(model))
    return min(most, shape.max_positions) if shape else most


def _default_response(model: object, of_the_embedded: int, most: int, length: object) -> int:
    """Resolve `${default_response:MODEL,A,B,LENGTH}`: A for the embedded model, else B or half of LENGTH if less."""
    return of_the_embedded if model == EMBEDDED else max(1, min(most, _tokens(length, 2 * most) // 2))


def _default_micro_batch(model: object, of_the_embedded: int, tokens: int, length: object) -> int:
    """Resolve `${default_micro_batch:MODEL,A,B,LENGTH}`: A for the embedded model, else B / LENGTH."""
    return of_the_embedded if model == EMBEDDED else max(1, tokens // _tokens(length, tokens))


def _default_rate(
    model: object, of_the_embedded: float, of_others: float, trains_adapters: object, algorithm: object
) -> float:
    """Resolve `${default_rate:MODEL,A,B,LORA,ALGORITHM}`: A for the embedded model and LoRA, else the algorithm's or
    B."""
    if model == EMBEDDED or trains_adapters is True:
        return of_the_embedded
    row = ALGORITHMS.get(str(algorithm))
    return of_others if row is None or row.learning_rate is None else row.learning_rate


def _default_batch(
    model: object, most: int, prompts: object, samples: object, policy_loss: object, *, _root_: DictConfig
) -> int:
    """Resolve `${default_batch:MODEL,A,PROMPTS,SAMPLES,TERM}`: the rollout. For the embedded model its largest divisor
    up to A, unless the policy term has no ratio. Without rollouts, A or a power of two below the file's rows."""
    sizes = [one for one in (prompts, samples) if isinstance(one, int) and one > 0]
    if len(sizes) < 2:
        return _less_than_rows(most, _root_)
    rollout = sizes[0] * sizes[1]
    if model != EMBEDDED or policy_loss == "reinforce":
        return rollout
    return next(size for size in range(min(most, rollout), 0, -1) if rollout % size == 0)


def _less_than_rows(most: int, composed: DictConfig) -> int:
    """Return the largest power of two, up to `most`, below the number of training rows of a file."""
    data = composed.data
    if data.name != "file" or data.train_path is None or data.get("sources"):
        return most
    try:
        paths = ",".join(data.train_path) if OmegaConf.is_list(data.train_path) else data.train_path
        rows = sum(1 for _ in islice(file_rows(paths), 2 * most))
        left = rows * (1 - float(data.validation_fraction)) * 0.9
    except (DataError, ValueError, TypeError, AttributeError):
        # The rules report it.
        return most
    return min(most, 2 ** int(log2(max(left, 1))))


def _default_for(model: object, of_the_embedded: float, of_others: float) -> float:
    """Resolve `${default_for:MODEL,A,B}`: A for the embedded model, else B."""
    return of_the_embedded if model == EMBEDDED else of_others


def _default_fraction(name: object, share: float, *, _root_: DictConfig, _parent_: DictConfig) -> float:
    """Resolve `${default_fraction:NAME,A}`: A if the run validates without a validation file or split, else 0."""
    source = {"file": "validation_path", "hub": "validation_split"}.get(str(name))
    if source is None or _parent_.get(source) is not None:
        return 0.0
    options = _root_.algorithm
    return share if options.get("val_at_start") or options.get("val_at_end") or options.get("val_period") else 0.0


def _default_steps(epochs: object, steps: int, *, _root_: DictConfig) -> int | None:
    """Resolve `${default_steps:EPOCHS,A}`: A, or None if epochs of a finite data set end the run."""
    sources = _root_.data.get("sources")
    data = [*sources.values()] if sources and isinstance(sources, DictConfig) else [_root_.data]
    return None if epochs and any(one.get("name") in ("file", "hub") for one in data) else steps


def _default_buffer(tokens: object, share: int) -> int:
    """Resolve `${default_buffer:TOKENS,N}`: TOKENS / N, at least 1."""
    return max(1, _tokens(tokens, share) // share)


def _tokens(length: object, otherwise: int) -> int:
    """Return the length, or `otherwise` if it is invalid, which is reported for its key."""
    return length if isinstance(length, int) and length > 0 else otherwise


for _resolver in (
    _default_length,
    _default_response,
    _default_micro_batch,
    _default_rate,
    _default_batch,
    _default_for,
    _default_fraction,
    _default_steps,
    _default_buffer,
):
    OmegaConf.register_new_resolver(_resolver.__name__.removeprefix("_"), _resolver, replace=True)


def compose_config(arguments: Sequence[str] = ()) -> Config:
    """Compose and validate the configuration that command-line arguments such as `policy.precision=bfloat16` describe.

    Raises:
        ConfigError: listing every violation: of the arguments, of types and ranges, of the rules.
    """
    arguments = expanded(arguments)
    overrides, violations = check_overrides(arguments)
    if violations and not overrides:
        # Only defaults are left, which are valid.
        raise ConfigError(violations)
    try:
        config = resolve(compose_files(overrides))
    except ConfigError as error:
        raise ConfigError([*violations, *placed(error.violations, arguments)]) from None
    if violations:
        raise ConfigError(violations)
    return config


def resolve(composed: DictConfig, matters: Callable[[Violation], bool] = lambda _: True) -> Config:
    """Convert Hydra's composed configuration to a typed, frozen `Config`. Ignore violations that do not `matter`.

    Raises:
        ConfigError: listing every unknown key, wrong type and broken rule.
    """
    values, violations = _plain(composed)
    config, type_violations = _validate(values)
    violations = [_naming_its_variable(one, composed) for one in (*violations, *type_violations)]
    unusable = frozenset(violation.key for violation in violations)
    if config is None:
        # Check the rules with defaults in place of unusable values.
        config, _ = _validate(_with_defaults(values, unusable))
    if config is not None:
        violations += filter(matters, check_rules(config, unusable))
    if violations or config is None:
        keys = {one.key for one in violations}
        # Leave out what follows from another wrong value.
        raise ConfigError([one for one in violations if keys.isdisjoint(_references(composed, one.key))])
    return config


def default_values(algorithm: str) -> dict[str, Any]:
    """Return this algorithm's default configuration, without required values."""
    return copy.deepcopy(_defaults(algorithm))


# Keys of earlier versions without a successor.
_REMOVED = ("checkpoint.resume_layouts",)


def restore(text: str) -> Config:
    """Read a configuration that a run has written (JSON). Earlier names of keys are replaced, removed keys are ignored,
    and keys that the run did not have get their defaults. Raises ConfigError: it is not JSON, or of a later version of
    this package."""
    try:
        values = _with_all_keys(json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError([Violation("config.json", None, f"is not JSON: {error}", "restore the file")]) from None
    try:
        return TypeAdapter(Config).validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError([described(details, known_keys()) for details in error.errors(include_url=False)]) from None


def _with_all_keys(values: dict[str, Any]) -> dict[str, Any]:
    # A source has the keys of these sections instead of the run.
    sources = [{**one, "data": one} for one in (_at(values, "data.sources") or {}).values()]
    for before, now in earlier_keys().items():
        for run in (values, *sources):
            section, name = _section_of(run, before)
            if name in section:
                section[now.rpartition(".")[2]] = section.pop(name)
    for key in _REMOVED:
        section, name = _section_of(values, key)
        section.pop(name, None)
    algorithm = _at(values, "algorithm.name")
    if algorithm in owners("algorithm.name"):
        defaults = default_values(algorithm)
        for key in known_keys(algorithm):
            is_own = key != "data.sources" and is_of(key, ("data", "reward", "environment", "agent"))
            for run in (values, *(sources if is_own else ())):
                section, name = _section_of(run, key)
                section.setdefault(name, _at(defaults, key))
        for one in sources:
            one["data"].setdefault("teacher", {"model_name": _at(values, "teacher.model_name")})
    return values


def _section_of(values: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the section of a key, empty if there is none, and the key's name there."""
    path, _, name = key.rpartition(".")
    section = _at(values, path)
    return (section if isinstance(section, dict) else {}), name


def _plain(composed: DictConfig) -> tuple[dict[str, Any], list[Violation]]:
    """Resolve interpolations separately, so that all failures are reported."""
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
    """Yield the keys that the value of a key refers to."""
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
        errors = [
            one
            for one in error.errors(include_url=False)
            if one["input"] != _UNUSABLE and not (is_of_variant(one) and one["input"].get("name") == _UNUSABLE)
        ]
        return None, merged([described(details, known_keys(), _algorithm(values)) for details in errors])


def _algorithm(values: dict[str, Any]) -> str:
    name = _at(values, "algorithm.name")
    return name if name in groups()["algorithm"] else DEFAULT_ALGORITHM


def _with_defaults(values: dict[str, Any], unusable: frozenset[str]) -> dict[str, Any]:
    """Return a copy of `values` with defaults for the keys of `unusable`; those without a default are gone."""
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
    """Return the node at a dotted path, or None."""
    for name in path.split(".") if path else ():
        node = node.get(name) if isinstance(node, dict) else None
    return node
