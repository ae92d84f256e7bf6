"""Hydra's side of a configuration: compose `configs/`, list the schema's keys, and answer an unknown key."""

import copy
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, Violation

CONFIG_NAME, ALIASES = "train", "aliases.yaml"
HYDRA_PACKAGE = "hydra"
RUN_FOLDER, SWEEP_FOLDER = "hydra.run.dir", "hydra.sweep.dir"
DEFAULT_ALGORITHM = "grpo"
# The least similarity of a guess to the key that was given.
_LIKE = 0.8
# Guess by the last part of a key only if at most this many keys share it.
_FEW = 3
_VARIABLE = re.compile(r"\b(?:oc\.env|variable):(\w+)")
_OWN_VARIABLES = "NRL_REFIT_"


# --- The files


def config_dir() -> Path:
    """Return the folder of YAML groups: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


@cache
def groups() -> dict[str, list[str]]:
    """Return each group with the names of its files."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(config_dir().iterdir())
        if folder.is_dir()
    }


@cache
def parse_override(argument: str) -> Override | None:
    """Parse one override as Hydra does; None if it is not one."""
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def chooses_file(override: Override) -> bool:
    """Return whether an override is of the form `group=file`."""
    return override.package is None and override.key_or_group in groups()


def compose_job(overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra composes of the files that `overrides` choose, with the values that they set.

    Raises:
        ConfigError: Hydra cannot; with its reason.
    """
    choices = tuple(one for one in overrides if (parsed := parse_override(one)) and chooses_file(parsed))
    composed = copy.deepcopy(_composed(config_dir(), choices))
    _set_values(composed, overrides)
    return composed


def compose_files(overrides: Sequence[str]) -> DictConfig:
    """Return what `compose_job` does, without the section `hydra`. Nothing is resolved or validated."""
    composed = compose_job(overrides)
    with open_dict(composed):
        del composed[HYDRA_PACKAGE]
    return composed


def lay_over(base: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of a composed configuration with valid overrides: sections of chosen files, then values.

    Raises:
        ConfigError: Hydra cannot; with its reason.
    """
    composed = copy.deepcopy(base)
    for one in filter(None, map(parse_override, overrides)):
        if chooses_file(one):
            composed[one.key_or_group] = compose_files([f"{one.key_or_group}={one.value()}"])[one.key_or_group]
    _set_values(composed, overrides)
    return composed


@cache
def _composed(folder: Path, choices: tuple[str, ...]) -> DictConfig:
    """Compose the chosen files of `folder`. Callers must not change the result."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)), _readable_errors():
        return compose(CONFIG_NAME, overrides=list(choices), return_hydra_config=True)


def _set_values(composed: DictConfig, overrides: Sequence[str]) -> None:
    with _readable_errors(), read_write(composed), open_dict(composed):
        if HYDRA_PACKAGE in composed:
            OmegaConf.set_readonly(composed[HYDRA_PACKAGE], None)
        for one in filter(None, map(parse_override, overrides)):
            if not chooses_file(one):
                OmegaConf.update(composed, one.key_or_group, one.value(), merge=True, force_add=True)


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError([Violation("the configuration", None, message, "see --help and --cfg job")]) from None


@cache
def known_variables() -> frozenset[str]:
    """Return the environment variables that the files refer to."""
    return frozenset(name for file in config_dir().rglob("*.yaml") for name in _VARIABLE.findall(file.read_text()))


def _variable(name: str, otherwise: Any) -> Any:
    """`${variable:NAME,B}`: an environment variable, or B where it is empty or not set."""
    return os.environ.get(name) or otherwise


OmegaConf.register_new_resolver("variable", _variable, replace=True)


def unread_variables() -> list[str]:
    """Return environment variables with this package's prefix that no file refers to."""
    return sorted(name for name in os.environ if name.startswith(_OWN_VARIABLES) and name not in known_variables())


def variables_of(composed: DictConfig, key: str) -> list[str]:
    """Return the environment variables that the value of a key refers to."""
    value = OmegaConf.to_container(composed, resolve=False)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return [name for name in _VARIABLE.findall(str(value)) if name in os.environ]


# --- The keys


@cache
def _schema() -> dict[str, dict[str, bool]]:
    """Map each algorithm to its keys, in the schema's order; True for those below which any key may stand."""
    variants = get_args(get_type_hints(Config)["algorithm"])
    names = {get_args(get_type_hints(variant)["name"])[0]: variant for variant in variants}
    return {name: dict(_keys(Config, variant)) for name, variant in names.items()}


def _keys(section: Any, algorithm: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    for name, kind in get_type_hints(section).items():
        yield f"{prefix}{name}", get_origin(kind) is dict
        below = algorithm if f"{prefix}{name}" == "algorithm" else kind
        if is_dataclass(below):
            yield from _keys(below, algorithm, f"{prefix}{name}.")


@cache
def known_keys(algorithm: str | None = None) -> tuple[str, ...]:
    """Return every key path, sections included, of one algorithm's configuration or of all."""
    chosen = _schema().values() if algorithm is None else [_schema()[algorithm]]
    return tuple(dict.fromkeys(key for keys in chosen for key in keys))


def owners(key: str) -> list[str]:
    """Return the algorithms that have a key."""
    return [name for name, keys in _schema().items() if key in keys]


def is_section(key: str) -> bool:
    """Return whether any key may stand below this one: a reward's arguments, vLLM's."""
    return any(keys.get(key, False) for keys in _schema().values())


def is_open(key: str) -> bool:
    """Return whether this key may be any: it is, or is below, such a section."""
    parts = key.split(".")
    return any(is_section(".".join(parts[:end])) for end in range(1, len(parts) + 1))


# --- Unknown keys


def unknown_key(key: str, given: object, algorithm: str = DEFAULT_ALGORITHM) -> Violation:
    """Return the problem of a key that this algorithm does not have: another's, another launcher's, or misspelt."""
    known, rule = known_keys(algorithm), "unknown key"
    here = to_our_key(key)
    have = owners(here)
    if here in known:
        has_keys = any(one.startswith(f"{here}.") for one in known)
        return Violation(key, given, rule, _fix(here if has_keys else f"{here}={{}}", given, algorithm))
    theirs = re.sub(r"^data\.(train|validation|default)\.(?=\w)", "data.*.", key)
    answer = _longest(_aliases("nemo_rl"), theirs) or _longest(_aliases("nemo_rl"), key)
    if answer := answer or (None if have else _longest(_aliases("nemo_rl"), here)):
        return Violation(key, given, rule, _fix(answer, given, algorithm))
    if have:
        files = [f"algorithm={name}" for name in sorted(have, key=lambda name: name != key.split(".")[0])]
        fix = f"remove it, or {files[0]}" if here == key else f"{here}, which needs {files[0]}"
        return Violation(key, given, f"is a key of {' and '.join(files)} only", fix)
    if term := re.fullmatch(r"(reward\.terms\.\w+)\.(\w+)", key):
        fix = f"{term[1]}.kwargs.{term[2]}, where the reward has such an argument"
        return Violation(key, given, f"{rule}: a term has name, weight and kwargs", fix)
    names, parts = _aliases("names"), key.split(".")
    if answer := names.get(".".join(parts[-2:])) or names.get(parts[-1]):
        return Violation(key, given, rule, _fix(answer, given, algorithm))
    if near := nearest_key(here, known):
        return Violation(key, given, rule, f"did you mean {near}?")
    if here != key:
        return Violation(key, given, rule, f"the section is {here.split('.')[0]} here; --cfg job lists its keys")
    return Violation(key, given, rule, "remove it: no key here is like it; --cfg job lists them")


def instead_of_file(group: str, name: str | None) -> str | None:
    """Return what to write in place of a file that a group does not have; None if nothing is known."""
    if group == "data" and name and "/" in name:
        return f"data=file data.train_path={name}" if "." in name else f"data=hub data.path={name}"
    answer = _aliases("files").get(f"{group}={name}")
    return None if answer is None else str(answer)


def to_our_key(key: str) -> str:
    """Return a key of NeMo-RL by the name that its section has here; any other key as it is."""
    sections, parts = _aliases("sections"), key.split(".")
    for end in range(len(parts), 0, -1):
        if section := sections.get(".".join(parts[:end])):
            return ".".join([str(section), *parts[end:]])
    return key


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the known key that a misspelt or misplaced one means; None if none is much like it."""
    section, _, leaf = key.rpartition(".")
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=_LIKE):
        return siblings[close[0]]
    if len(longer := [one for name, one in siblings.items() if len(leaf) > _FEW and name.startswith(leaf)]) == 1:
        return longer[0]
    same = [one for one in known if one.rpartition(".")[2] == leaf]
    if 0 < len(same) <= _FEW:
        return max(same, key=lambda one: difflib.SequenceMatcher(None, one, key).ratio())
    # A section is misspelt.
    return next(iter(difflib.get_close_matches(key, same or known, n=1, cutoff=0.9)), None)


def _fix(answer: str | Sequence[str], given: object, algorithm: str) -> str:
    """Return an answer of the aliases as a fix: the first that this algorithm can have."""
    known = known_keys(algorithm)
    answers = [answer] if isinstance(answer, str) else list(answer)
    keys = [re.match(r"algorithm\.[\w.]+", one) for one in answers]
    fits = [one for one, key in zip(answers, keys, strict=True) if key is None or key[0].rstrip(".") in known]
    chosen = fits[0] if fits else answers[0]
    if chosen.endswith("={}") and not isinstance(given, str):
        chosen = chosen.removesuffix("={}")
    needs = "" if fits or not keys[0] else f", which needs algorithm={owners(keys[0][0])[0]}"
    if chosen in known and not needs:
        return f"did you mean {chosen}?"
    return chosen.replace("{}", str(given)) + needs


def _longest[Answer](table: Mapping[str, Answer], key: str) -> Answer | None:
    """Return the entry of a key, or of the nearest section above it that has one."""
    while key and key not in table:
        key = key.rpartition(".")[0]
    return table.get(key)


@cache
def _aliases(part: str) -> dict[str, str | list[str]]:
    """Return one part of aliases.yaml, an entry for each name; sections of NeMo-RL before their keys."""
    import yaml

    entries = yaml.safe_load((config_dir() / ALIASES).read_text())[part]
    found = {}
    for names, answer in entries.items():
        below = answer if isinstance(answer, dict) else {"": answer}
        for name in names.split():
            for ends, one in below.items():
                found |= {f"{name}.{end}".rstrip("."): one for end in (ends.split() or [""])}
    return found


def flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key's dotted path and value; tuples as lists."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
