"""What `configs/` holds: its groups, their files, and every key they give."""

import copy
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import run_and_report
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_lite.config.nemo_rl_names import instead_of_nemo_rls, name_here
from nemo_rl_lite.config.other_names import instead_of, meant_keys, most_like
from nemo_rl_lite.errors import ConfigError, Violation

CONFIG_NAME = "train"
HYDRA_PACKAGE = "hydra"
RUN_FOLDER, SWEEP_FOLDER = "hydra.run.dir", "hydra.sweep.dir"
# How much a misspelt key is like what is meant, as a ratio: in its own section, and elsewhere.
_LIKE_A_SIBLING, _LIKE = 0.7, 0.8
# Of how many keys the last part may be that a guess goes by; that of more, such as `name`, says nothing.
_FEW = 3
# Sections whose keys belong to somebody else: a user's reward, environment or agent, vLLM, a task's generator.
_OPEN_SECTIONS = (
    "algorithm.loss_kwargs",
    "reward.kwargs",
    "reward.terms",
    "environment.kwargs",
    "agent.kwargs",
    "generation.vllm_kwargs",
    "data.task_kwargs",
    "policy.tokenizer.chat_template_kwargs",
)


def config_dir() -> Path:
    """The folder of YAML groups: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def compose_files(overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra composes of `configs/` and `overrides`, neither resolved nor validated.

    Hydra reads the files once for each set of them, and sets plain values in a copy. The folder of a run is no part of
    its configuration.

    Raises:
        ConfigError: Hydra cannot; with its reason.
    """
    choices, values = [], []
    for argument in overrides:
        override = parse_override(argument)
        if override is not None and _names_file(override):
            choices.append(argument)
        elif override is not None and _is_plain(override):
            values.append(override)
        elif override is None or not _names_folder(override):
            return compose_with_hydra(overrides)
    composed = copy.deepcopy(_composed_files(config_dir(), tuple(choices)))
    with _readable_errors():
        ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    return composed


def lay_over(base: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of a composed configuration with valid overrides: sections of the files that they choose take the
    place of its own, then values are set.

    Raises:
        ConfigError: Hydra cannot; with its reason.
    """
    composed = copy.deepcopy(base)
    parsed = [override for override in map(parse_override, overrides) if override]
    for one in filter(_names_file, parsed):
        composed[one.key_or_group] = compose_files([f"{one.key_or_group}={one.value()}"])[one.key_or_group]
    with _readable_errors():
        values = [one for one in parsed if not _names_file(one)]
        ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    return composed


def compose_with_hydra(overrides: Sequence[str]) -> DictConfig:
    """Return what `compose_files` does, which is faster."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())), _readable_errors():
        return compose(CONFIG_NAME, overrides=list(overrides))


def run_with_hydra(task: Callable[[DictConfig], None], overrides: Sequence[str], sweeps: bool) -> None:
    """Make the folder of a run, or of each run of a sweep, and call `task` there, as `hydra.main` does. That composes
    the configuration once more, to find out whether it sweeps."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
        hydra = GlobalHydra.instance().hydra
        begin, mode = (hydra.multirun, "MULTIRUN") if sweeps else (hydra.run, "RUN")  # pyrefly: ignore
        run_and_report(lambda: begin(CONFIG_NAME, task, [*overrides, f"{HYDRA_PACKAGE}.mode={mode}"]))


@cache
def parse_override(argument: str) -> Override | None:
    """Parse one override as Hydra does; None where it is not one."""
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def chooses_file(override: Override) -> bool:
    """Whether an override is of the form `group=file`."""
    return override.package is None and override.key_or_group in groups()


def _names_file(override: Override) -> bool:
    """As Hydra decides it: a mapping is a value also where it is given to a group."""
    return chooses_file(override) and not isinstance(override.value(), dict)


def _is_plain(override: Override) -> bool:
    """Whether an override only sets a value of the run's configuration, whatever else that contains."""
    key = override.key_or_group
    return _only_sets(override) and "/" not in key and key.split(".")[0] != HYDRA_PACKAGE


def _names_folder(override: Override) -> bool:
    """Whether an override only tells Hydra the folder of a run or a sweep."""
    is_text = isinstance(override.value(), str | QuotedString)
    return _only_sets(override) and override.key_or_group in (RUN_FOLDER, SWEEP_FOLDER) and is_text


def _only_sets(override: Override) -> bool:
    return override.package is None and not (override.is_delete() or override.is_add() or override.is_sweep_override())


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError([Violation("the configuration", None, message, "see --help and --cfg job")]) from None


@cache
def _composed_files(folder: Path, choices: tuple[str, ...]) -> DictConfig:
    """Cache what Hydra composes of the files of `folder` that `choices` name. Callers must not change it."""
    return compose_with_hydra(choices)


@cache
def groups() -> dict[str, list[str]]:
    """Group -> its files' names."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(config_dir().iterdir())
        if folder.is_dir()
    }


@cache
def known_keys(choices: tuple[str, ...] = ()) -> list[str]:
    """Every key path, sections included, of the default configuration with other files chosen (`algorithm=sft`)."""
    return list(_paths(OmegaConf.to_container(compose_files(choices), resolve=False)))


def is_open(key: str) -> bool:
    """Whether any key may stand there."""
    return any(f"{key}.".startswith(f"{section}.") for section in _OPEN_SECTIONS)


def is_section(key: str) -> bool:
    """Whether the key is one below which any key may stand."""
    return key in _OPEN_SECTIONS


def nearest_key(key: str, known: Sequence[str], cutoff: float = _LIKE) -> str | None:
    """The known key that a misspelt or misplaced one most likely means, or None."""
    if meant := meant_keys(key, known):
        return meant[0]
    leaves: dict[str, list[str]] = {}
    for path in known:
        leaves.setdefault(path.rpartition(".")[2], []).append(path)
    close = difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=cutoff)
    if not close:
        return None
    nearest = most_like(key, leaves[close[0]])
    return nearest if len(leaves[close[0]]) <= _FEW or difflib.get_close_matches(key, [nearest], cutoff=_LIKE) else None


def unknown_key(key: str, given: object, known: Sequence[str]) -> Violation:
    """A key that is not among `known`: another file's, another launcher's, or a misspelt one."""
    here = name_here(key)
    if here in known:
        return Violation(key, given, "unknown key", f"did you mean {here}?")
    owners = _owners(here, key.split(".")[0])
    if answer := instead_of_nemo_rls(key) or (None if owners else instead_of_nemo_rls(here)):
        return Violation(key, given, "unknown key", f"did you mean {answer}?" if answer in known else answer)
    if owners:
        fix = f"remove it, or {owners[0]}" if here == key else f"{here}, which needs {owners[0]}"
        return Violation(key, given, f"is a key of {' and '.join(owners)} only", fix)
    if term := re.fullmatch(r"(reward\.terms\.\w+)\.(\w+)", key):
        fix = f"{term[1]}.kwargs.{term[2]}, where the reward has such an argument"
        return Violation(key, given, "unknown key: a term has name, weight and kwargs", fix)
    hint = " and ".join(meant_keys(key, known))
    if not hint and (fix := instead_of(key)):
        return Violation(key, given, "unknown key", fix)
    siblings = [path for path in known if path.rpartition(".")[0] == here.rpartition(".")[0]]
    hint = hint or nearest_key(here, siblings, _LIKE_A_SIBLING)
    if not hint and here != key:
        fix = f"the section is {here.split('.')[0]} here; --cfg job lists its keys"
        return Violation(key, given, "unknown key", fix)
    hint = hint or nearest_key(key, known)
    nothing = "remove it: no key here is like it; --cfg job lists them"
    return Violation(key, given, "unknown key", f"did you mean {hint}?" if hint else nothing)


def _owners(key: str, meant: str) -> list[str]:
    """The choices of files that have a key; first the file `meant`, or else the group's default."""
    section = key.split(".")[0]
    files = groups().get(section, [])
    have = [file for file in files if len(files) > 1 and key in known_keys((f"{section}={file}",))]
    # A file over another of them, which it names, says nothing more.
    owners = [file for file in have if _name_in(section, file) not in {*have} - {file}]
    usual = compose_files(())[section].get("name") if owners else None
    return [f"{section}={file}" for file in sorted(owners, key=lambda file: (file != meant, file != usual))]


def _name_in(section: str, file: str) -> object:
    """The value of the key `name` in a section with this file; None where it has none."""
    return compose_files((f"{section}={file}",))[section].get("name")


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    if not isinstance(node, dict):
        return
    for name, child in node.items():
        yield f"{prefix}{name}"
        yield from _paths(child, f"{prefix}{name}.")
