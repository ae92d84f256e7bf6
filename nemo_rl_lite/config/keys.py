"""Names of a configuration: groups and files of `configs/`, keys of the schema, and answers to unknown keys."""

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation

ALIASES = "aliases.yaml"
HYDRA_PACKAGE = "hydra"
RUN_FOLDER, SWEEP_FOLDER = "hydra.run.dir", "hydra.sweep.dir"
DEFAULT_ALGORITHM = "grpo"
# Sections of NeMo-RL with an algorithm's options.
ALGORITHM_SECTIONS = ("grpo", "sft", "dpo", "distillation")
# Prefix of an alias for a key without effect here.
NOTHING = "nothing:"
# Minimum similarity of a suggestion to the given key.
_LIKE = 0.8
# Suggest by the last part of a key only if at most this many keys share it.
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


@cache
def known_variables() -> frozenset[str]:
    """Return the environment variables that the files refer to."""
    return frozenset(name for file in config_dir().rglob("*.yaml") for name in _VARIABLE.findall(file.read_text()))


# `${variable:NAME,B}` is an environment variable, or B if it is empty or not set.
OmegaConf.register_new_resolver("variable", lambda name, other: os.environ.get(name) or other, replace=True)


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
    """Map each algorithm to its keys, in the schema's order; True for open sections, which accept any key."""
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
    """Return every key path, sections included, of one algorithm or of all."""
    chosen = _schema().values() if algorithm is None else [_schema()[algorithm]]
    return tuple(dict.fromkeys(key for keys in chosen for key in keys))


def owners(key: str) -> list[str]:
    """Return the algorithms that have a key."""
    return [name for name, keys in _schema().items() if key in keys]


def is_section(key: str) -> bool:
    """Return whether this section accepts any key: arguments of a reward, of vLLM."""
    return any(keys.get(key, False) for keys in _schema().values())


def is_open(key: str) -> bool:
    """Return whether the key is an open section or below one."""
    parts = key.split(".")
    return any(is_section(".".join(parts[:end])) for end in range(1, len(parts) + 1))


# --- Unknown keys


def unknown_key(key: str, given: object, algorithm: str = DEFAULT_ALGORITHM) -> Violation:
    """Return the problem of an unknown key: another algorithm's, another launcher's, or misspelt."""
    known, rule = known_keys(algorithm), "unknown key"
    here = to_our_key(key)
    have = owners(here)
    if here in known:
        has_keys = any(one.startswith(f"{here}.") for one in known)
        return Violation(key, given, rule, _fix(here if has_keys else f"{here}={{}}", given, algorithm))
    answer = answer_to(key, given, not have)
    if answer is not None:
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
    return Violation(key, given, rule, "remove it, or search with nrl-lite keys WORD")


def answer_to(key: str, given: object, by_section: bool = True) -> str | Sequence[str] | None:
    """Return the counterpart of an unknown name with this value in aliases.yaml; None if there is none.

    `by_section`: also look up the name with our name of its section."""
    theirs = re.sub(r"^data\.(train|validation|default)\.(?=\w)", "data.*.", key)
    names = [theirs, key, *([to_our_key(key)] if by_section else [])]
    table = _aliases("short") | _aliases("earlier") | _aliases("nemo_rl")
    found = next((table[one] for one in (key, *names) if one in table), None)
    if found is None:
        above = filter(None, (_longest(table, one.rpartition(".")[0]) for one in names))
        found = next((one for one in above if not isinstance(one, str) or "={" not in one), None)
    if isinstance(found, Mapping):
        return found.get(_text_of(given), found.get("otherwise"))
    return found


def earlier_keys() -> dict[str, str]:
    """Map earlier names of keys to the present ones."""
    return {before: now.removesuffix("={}") for before, now in _aliases("earlier").items()}


def instead_of_file(group: str, name: str | None) -> str | None:
    """Return the fix for a file that a group does not have; None if none is known."""
    if group == "data" and name and "/" in name:
        return f"data=file data.train_path={name}" if "." in name else f"data=hub data.path={name}"
    answer = _aliases("files").get(f"{group}={name}")
    return None if answer is None else str(answer)


@cache
def algorithm_of_file(name: str) -> str:
    """Return the algorithm of a file of the group; the default one if there is no such file."""
    file = config_dir() / "algorithm" / f"{name}.yaml"
    content = yaml.safe_load(file.read_text()) if file.is_file() else {}
    base = next((one for one in content.get("defaults", ()) if isinstance(one, str) and one != "_self_"), None)
    return str(content.get("name") or (algorithm_of_file(base) if base else DEFAULT_ALGORITHM))


def to_our_key(key: str) -> str:
    """Return a key of NeMo-RL with our name of its section; other keys unchanged."""
    sections, parts = _aliases("sections"), key.split(".")
    for end in range(len(parts), 0, -1):
        if section := sections.get(".".join(parts[:end])):
            return ".".join([str(section), *parts[end:]])
    return key


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the known key most similar to a misspelt or misplaced one; None if none is similar enough."""
    section, _, leaf = key.rpartition(".")
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=_LIKE):
        return siblings[close[0]]
    longer = [
        one
        for name, one in siblings.items()
        if len(leaf) > _FEW and difflib.get_close_matches(leaf, [name[: len(leaf) + 1]], cutoff=0.9)
    ]
    if len(longer) == 1:
        return longer[0]
    same = [one for one in known if one.rpartition(".")[2] == leaf]
    if 0 < len(same) <= _FEW:
        return max(same, key=lambda one: difflib.SequenceMatcher(None, one, key).ratio())
    # A section is misspelt.
    return next(iter(difflib.get_close_matches(key, same or known, n=1, cutoff=0.9)), None)


def _fix(answer: str | Sequence[str], given: object, algorithm: str) -> str:
    """Return a counterpart as a fix: the first one valid for this algorithm."""
    known = known_keys(algorithm)
    answers = [answer] if isinstance(answer, str) else list(answer)
    keys = [re.match(r"algorithm\.[\w.]+", one) for one in answers]
    fits = [one for one, key in zip(answers, keys, strict=True) if key is None or key[0].rstrip(".") in known]
    chosen = fits[0] if fits else answers[0]
    if not chosen or chosen.startswith(NOTHING):
        return f"leave it out: {chosen.removeprefix(NOTHING).strip() or 'this is always the case'}"
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
def _aliases(part: str) -> dict[str, Any]:
    """Return one part of aliases.yaml by name, sections of NeMo-RL before their keys. An entry is a text, a list of
    texts, or a text for each value."""
    found = {}
    for names, answer in _alias_file()[part].items():
        below = answer if isinstance(answer, dict) and "otherwise" not in answer else {"": answer}
        for name in names.split():
            for ends, one in below.items():
                by_value = one if not isinstance(one, dict) else _by_value(one)
                found |= {f"{name}.{end}".rstrip("."): by_value for end in (ends.split() or [""])}
    return found


@cache
def _alias_file() -> dict[str, Any]:
    return yaml.safe_load((config_dir() / ALIASES).read_text())


def _by_value(answers: Mapping[Any, str]) -> dict[str, str]:
    return {text: answer for values, answer in answers.items() for text in _text_of(values).split()}


def _text_of(value: object) -> str:
    """Return a value as YAML. `1` and `1.0` are equal."""
    whole = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else json.dumps(int(value) if whole else value)


def flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key's dotted path and value; tuples as lists."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
