"""Compose `configs/` with Hydra: the files that a command chooses, by our names, then the values that it sets."""

import copy
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_lite.config import keys
from nemo_rl_lite.config.keys import (
    ALGORITHM_SECTIONS,
    DEFAULT_ALGORITHM,
    HYDRA_PACKAGE,
    chooses_file,
    flatten,
    groups,
    is_open,
    known_keys,
    parse_override,
)
from nemo_rl_lite.config.names import SAME, in_our_names, meaning, with_our_references
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, Violation

CONFIG_NAME = "train"
DEFAULT_DATA = "reverse_digits"
# Keys of data, and the file of the group that reads them.
DATA_OF = {"train_path": "file", "path": "hub"}
# Default files of groups that depend on the machine, and those that a run on GPUs has instead.
ON_CPUS = {"policy": "megatron", "generation": "vllm", "offload": "none"}
_ON_GPUS = {"policy": "megatron_gpu", "generation": "vllm_gpu", "offload": "auto"}
# Keys that name a file or user code of a source.
_SOURCE_FILE = re.compile(r"data\.sources\.[^.]+\.(reward|environment|agent)")
# Files of groups for user code.
_PLAIN_FILES = {"reward": "exact_match", "environment": "none", "agent": "none"}
# In NeMo-RL's files a token limit is the product of two keys.
OmegaConf.register_new_resolver("mul", lambda one, other: one * other, replace=True)


def compose_job(overrides: Sequence[str]) -> DictConfig:
    """Compose the files and values of `overrides` with Hydra.

    Raises:
        ConfigError: Hydra fails; with its reason.
    """
    choices = _choices(overrides)
    composed, _ = _composed(keys.config_dir(), choices)
    _set_values(composed, overrides)
    if implied := _implied(composed, choices):
        return compose_job([*implied, *overrides])
    _complete_sources(composed)
    return composed


def with_implied_files(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, after choices of the files that their values imply. Raises ConfigError: Hydra fails."""
    choices = _choices(overrides)
    composed, _ = _composed(keys.config_dir(), choices)
    _set_values(composed, overrides)
    return [*_implied(composed, choices), *overrides]


def compose_files(overrides: Sequence[str]) -> DictConfig:
    """Return the result of `compose_job` without the section `hydra`, unresolved and not validated."""
    composed = compose_job(overrides)
    with open_dict(composed):
        del composed[HYDRA_PACKAGE]
    return composed


def lay_over(base: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of a composed configuration with valid overrides: sections of chosen files, then values.

    Raises:
        ConfigError: Hydra fails; with its reason.
    """
    composed = copy.deepcopy(base)
    for one in filter(None, map(parse_override, overrides)):
        if chooses_file(one):
            composed[one.key_or_group] = compose_files([f"{one.key_or_group}={one.value()}"])[one.key_or_group]
    _set_values(composed, overrides)
    _complete_sources(composed)
    return composed


def overlaid(config: Config, overrides: Sequence[str]) -> DictConfig:
    """Return a configuration with valid overrides, as `lay_over` does."""
    return lay_over(OmegaConf.create(as_composed(config)), overrides)


def as_composed(config: Config) -> dict[str, Any]:
    """Return a configuration as mappings, for overrides. `${` is escaped, so that nothing is interpolated."""
    return json.loads(json.dumps(asdict(config)).replace("${", "\\\\${"))


def notes_on_names(arguments: Sequence[str]) -> list[str]:
    """Return a note on each name of NeMo-RL in a command or its files."""
    overrides, told = in_our_names(arguments)
    choices = _choices(overrides)
    composed, of_files = _composed(keys.config_dir(), choices)
    if implied := _implied(composed, choices):
        _, of_files = _composed(keys.config_dir(), (*implied, *choices))
    return [*told, *of_files]


def _choices(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(one for one in overrides if (parsed := parse_override(one)) and chooses_file(parsed))


def _composed(folder: Path, choices: tuple[str, ...]) -> tuple[DictConfig, tuple[str, ...]]:
    """Compose the chosen files of `folder` with our names, and return notes on the others."""
    pickled, notes = _composed_once(folder, choices)
    return pickle.loads(pickled), notes  # noqa: S301 (made here)


@cache
def _composed_once(folder: Path, choices: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """Return the result of `_composed` pickled: unpickling takes a sixth of the time of a deep copy."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)), _readable_errors():
        composed = compose(CONFIG_NAME, overrides=list(choices), return_hydra_config=True)
    notes = tuple(_name_as_ours(composed))
    return pickle.dumps(composed), notes


def _implied(composed: DictConfig, choices: Sequence[str]) -> list[str]:
    """Return the files that values imply, for groups without a chosen file."""
    chosen = {one.partition("=")[0] for one in choices}
    default = composed.hydra.runtime.choices
    implied = []
    if _uses_gpus(composed):
        open_groups = [one for one, file in ON_CPUS.items() if one not in chosen and default[one] == file]
        # Someone who chooses the policy's file has decided where its tensors are.
        implied += [f"{one}={_ON_GPUS[one]}" for one in open_groups if one != "offload" or "policy" in open_groups]
    if "data" not in chosen and default.data == DEFAULT_DATA:
        implied += [f"data={file}" for key, file in DATA_OF.items() if composed.data.get(key) is not None][:1]
    if "algorithm" not in chosen and default.algorithm == DEFAULT_ALGORITHM:
        implied += [
            f"algorithm={name}" for name in ALGORITHM_SECTIONS if name != DEFAULT_ALGORITHM and name in composed
        ]
    return implied


def _uses_gpus(composed: DictConfig) -> bool:
    try:
        count = OmegaConf.select(composed, "cluster.gpus_per_node")
    except OmegaConfBaseException:
        # The validation reports it.
        return False
    return isinstance(count, int) and count > 0


# --- Sources of a mixture


def _complete_sources(composed: DictConfig) -> None:
    """Complete each source of `data.sources`: its file or the run's section, then its own values. Null has none."""
    with read_write(composed), open_dict(composed), _readable_errors():
        if composed.data.get("sources") is None:
            composed.data.sources = {}
        sources = composed.data.sources
        if not isinstance(sources, DictConfig):
            return
        shared = {name: value for name, value in composed.data.items_ex(resolve=False) if name != "sources"}
        given_sources: Any = OmegaConf.to_container(sources, resolve=False)
        for name, given in given_sources.items():
            if isinstance(given, dict):
                sources[name] = _completed(composed, shared, f"data.sources.{name}", given)


def _completed(composed: DictConfig, shared: Mapping[str, Any], key: str, given: dict[str, Any]) -> Any:
    preset = given.pop("preset", None)
    base = dict(shared) if preset is None else _file("data", preset, f"{key}.preset")
    base.pop("sources", None)
    implied = next(({"name": file} for own, file in DATA_OF.items() if given.get(own) is not None), {})
    own = {"weight": 1.0, "max_new_tokens": "${generation.max_new_tokens}"}
    own |= {"teacher": {"model_name": "${teacher.model_name}"}}
    found: Any = OmegaConf.merge(base, implied, own, given)
    # An environment excludes an agent, so a source with one of them does not have the run's other.
    for section, other in (("reward", ""), ("environment", "agent"), ("agent", "environment")):
        value = given.get(section, "none" if other in given else {})
        found[section] = _section(composed, section, value, f"{key}.{section}")
    return found


def _section(composed: DictConfig, section: str, given: Any, key: str) -> Any:
    """Return a source's reward, environment or agent: a file's or user code's name, or keys."""
    own = {"name": given} if isinstance(given, str) else given
    if not isinstance(own, dict):
        return given
    name = own.get("name")
    if name is None and "name" not in own:
        return OmegaConf.merge(composed[section], own)
    # A complete section, such as that of an earlier run, keeps its values.
    if name in groups()[section]:
        return OmegaConf.merge(_file(section, str(name), key), {word: own[word] for word in own if word != "name"})
    return OmegaConf.merge(_file(section, _PLAIN_FILES[section], key), own)


def _file(group: str, name: str, key: str) -> dict[str, Any]:
    """Return the values of a group's file, unresolved."""
    if name not in groups()[group]:
        raise ConfigError([Violation(key, name, "no such file", f"choose one of: {', '.join(groups()[group])}")])
    return dict(_composed(keys.config_dir(), (f"{group}={name}",))[0][group].items_ex(resolve=False))


def _name_as_ours(composed: DictConfig) -> Iterator[str]:
    """Move values of NeMo-RL's names to ours, and yield a note on each. Unknown names stay."""
    values: Any = OmegaConf.to_container(composed, resolve=False)
    known = {*known_keys()}
    del values[HYDRA_PACKAGE]
    others = {key: value for key, value in flatten(values) if key not in known and not is_open(key)}
    # A switch is applied after the keys that it switches.
    for key, given in sorted(others.items(), key=lambda pair: isinstance(pair[1], bool)):
        value = with_our_references(key, given)
        text = json.dumps(value)
        found = meaning(key, value, text, composed.algorithm.name)
        if found is None:
            continue
        if not found.note.endswith(SAME):
            yield found.note
        with read_write(composed), open_dict(composed):
            for one in found.overrides:
                name, _, of_it = one.partition("=")
                OmegaConf.update(composed, name, value if of_it == text else _value(one), force_add=True)
            _remove(composed, key)


def _remove(composed: DictConfig, key: str) -> None:
    """Remove a key, and the sections above it that are empty without it."""
    while key:
        section, _, name = key.rpartition(".")
        node = OmegaConf.select(composed, section) if section else composed
        del node[name]
        key = "" if node else section


def _set_values(composed: DictConfig, overrides: Sequence[str]) -> None:
    with _readable_errors(), read_write(composed), open_dict(composed):
        if HYDRA_PACKAGE in composed:
            OmegaConf.set_readonly(composed[HYDRA_PACKAGE], None)
        for one in filter(None, map(parse_override, overrides)):
            if not chooses_file(one):
                # Another override may set a further key of the section.
                names_file = isinstance(one.value(), str) and _SOURCE_FILE.fullmatch(one.key_or_group)
                key = f"{one.key_or_group}.name" if names_file else one.key_or_group
                OmegaConf.update(composed, key, one.value(), merge=True, force_add=True)


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError([Violation("the configuration", None, message, "see --help and --cfg job")]) from None


def _value(override: str) -> Any:
    parsed = parse_override(override)
    return None if parsed is None else parsed.value()
