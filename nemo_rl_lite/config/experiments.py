"""Convert experiment files, a user's YAML in any folder, to overrides of the command line.

A file has keys and, like a recipe, a defaults list: files of groups, neighbouring files, and a base recipe. Each key
becomes an override with its file and line, so all checks apply to it. `--like RUN` reads a run's record the same way.
"""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_lite.config.composition import CONFIG_NAME, ON_CPUS, compose_files
from nemo_rl_lite.config.keys import HYDRA_PACKAGE, groups, known_keys, parse_override
from nemo_rl_lite.config.names import FromFile
from nemo_rl_lite.errors import HIDDEN, ConfigError, Violation

RECIPES, SEARCH_PATH = "recipes", f"{HYDRA_PACKAGE}.searchpath"
_SUFFIXES = (".yaml", ".yml")
# These groups fill another section.
_SECTIONS = {RECIPES: "", "offload": "policy"}
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
# Options that name files, as words of the command line.
_OPTIONS = {
    "--like": "like={}",
    **dict.fromkeys(("--config", "--config-name", "-cn"), "recipes={}"),
    **dict.fromkeys(("--config-dir", "-cd", "--config-path", "-cp"), SEARCH_PATH + "=[{}]"),
}
LIKE, _RECORD = "like", "config.json"
# A path such as `~/data` as a value, which neither a shell nor Hydra reads.
_AT_HOME = re.compile(r"^([^=~]+=)(~[^'\",]*)$")
_ITEM = re.compile(r"(?:(?:override|optional)\s+)*/?(?P<group>[\w/-]+)(?:@\S+)?")


def as_words(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with each option that names a file as a word: `--like RUN` as `like=RUN`."""
    words, rest = [], list(arguments)
    while rest:
        name, mark, value = rest.pop(0).partition("=")
        if name in _OPTIONS and (mark or rest):
            words.append(_OPTIONS[name].format(value if mark else rest.pop(0)))
        else:
            words.append(f"{name}{mark}{value}")
    return words


def expanded(arguments: Sequence[str]) -> list[str]:
    """Return the overrides with each named file replaced by its keys. Typed ones come last and win.

    A sweep over files is unchanged.

    Raises:
        ConfigError: all problems of the files.
    """
    reader = _Reader()
    typed: list[str] = []
    for argument in arguments:
        if argument.partition("=")[0].lstrip("+") == SEARCH_PATH:
            reader.search(argument)
    for argument in arguments:
        if isinstance(argument, FromFile):
            reader.found.append(argument)
        elif argument.startswith(f"{LIKE}="):
            reader.read_record(Path(argument.partition("=")[2]).expanduser(), {_target(one) for one in arguments})
        elif chosen := reader.file_named_by(argument):
            reader.read(*chosen, "")
        elif argument.partition("=")[0].lstrip("+") != SEARCH_PATH:
            typed.append(_AT_HOME.sub(r"\1'\2'", argument))
    if reader.wrong:
        raise ConfigError(reader.wrong)
    # The last file wins over earlier ones, and typed overrides win over files.
    last = {_target(one): one for one in reader.found}
    own = {_target(one) for one in typed}
    return [*(one for one in last.values() if _target(one) not in own), *typed]


def placed(violations: Sequence[Violation], arguments: Sequence[str]) -> list[Violation]:
    """Return the violations, each with the place of its key in a file."""
    places = {_target(one): one.place for one in arguments if isinstance(one, FromFile)}
    return [one if one.place else replace(one, place=places.get(one.key)) for one in violations]


def as_override(key: str, value: Any) -> str:
    """Return a key and its value in the syntax of Hydra's command line."""
    return f"{key}={_value(value)}"


def names_file(name: str | None) -> bool:
    """Return whether a choice is the path of a file."""
    return name is not None and name.endswith(_SUFFIXES)


def _target(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+")


def _value(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return QuotedString(value, Quote.single).with_quotes()
        case Mapping():
            pairs = [f"{re.sub(r'([^\w./-])', r'\\\1', str(key))}: {_value(one)}" for key, one in value.items()]
            return f"{{{', '.join(pairs)}}}"
        case list():
            return f"[{', '.join(map(_value, value))}]"
    return str(value)


@dataclass(frozen=True)
class _Source:
    """A file while it is read: its group, the lines of its keys, and the files that include it."""

    file: Path
    shown: str
    group: str
    lines: Mapping[str, int]
    above: tuple[Path, ...]

    def place(self, path: str) -> str:
        """Return file and line of a key, or of an item of the defaults list."""
        return f"{self.shown}, line {self.lines[path]}" if path in self.lines else self.shown


class _Reader:
    """Reads files into overrides and collects their problems."""

    def __init__(self) -> None:
        self.found: list[FromFile] = []
        self.wrong: list[Violation] = []
        # More folders with files of groups, as `GROUP/NAME.yaml`.
        self._folders: list[Path] = []

    def search(self, argument: str, beside: Path | None = None) -> None:
        """Add the folders of `hydra.searchpath=[...]` to those with files of groups."""
        override = parse_override(argument)
        value = override.value() if override else None
        for one in value if isinstance(value, list) else [value]:
            scheme, mark, path = str(one).rpartition("://")
            folder = (beside or Path()) / Path(path).expanduser()
            if scheme not in ("", "file") or not folder.is_dir():
                rule = (
                    "is not a folder of this machine" if scheme in ("", "file") else f"{scheme}{mark} is not searched"
                )
                self.wrong.append(
                    Violation(SEARCH_PATH, one, rule, f"{SEARCH_PATH}=[file://FOLDER], with GROUP/NAME.yaml")
                )
            else:
                self._folders.append(folder)

    def file_named_by(self, argument: str) -> tuple[str, Path] | None:
        """Return group and path of the file that an argument names; None if it names none, or several."""
        key, mark, text = argument.partition("=")
        if not mark:
            return (RECIPES, Path(argument).expanduser()) if names_file(argument) else None
        group = key.lstrip("+")
        if group not in groups() or not text:
            return None
        override = parse_override(argument)
        if override is not None and override.is_sweep_override() and not Path(text).expanduser().is_file():
            return None
        name = str(override.value()) if override and not override.is_sweep_override() else text
        return (group, found) if (found := self._find(group, name, Path())) else None

    def _find(self, group: str, name: str, folder: Path) -> Path | None:
        """Return the file of a choice, relative to `folder`; None if it is built in or missing."""
        path = folder / Path(name).expanduser()
        if names_file(name):
            return path
        if group == RECIPES or "/" in name:
            beside = [Path(f"{path}{suffix}") for suffix in _SUFFIXES]
            if folder != Path() or name not in groups()[group]:
                for one in beside:
                    if one.is_file():
                        return one
        if name not in groups()[group]:
            places = [folder / group, *(place / group for place in self._folders)]
            places += self._folders if group == RECIPES else []
            for one in (place / f"{name}{suffix}" for place in places for suffix in _SUFFIXES):
                if one.is_file():
                    return one
        return None

    # --- A run

    def read_record(self, run: Path, typed: Collection[str]) -> None:
        """Add the values of a run's record that differ from the defaults."""
        file = run if run.is_file() else run / _RECORD
        try:
            record = json.loads(file.read_text())
        except (OSError, ValueError):
            record = None
        # A model's folder has a config.json as well.
        if not (isinstance(record, dict) and isinstance(record.get("algorithm"), dict)):
            jobs = sorted(one.parent.name for one in run.glob(f"*/{_RECORD}"))
            fix = f"--like {run / jobs[0]}" if jobs else "--like outputs/NAME/DATE, a folder that train has written"
            self._refuse(f"--like {run}", f"is not a run: {file} is missing or not a run's record", fix, "")
            return
        # A record has all values, so no further files follow from them.
        chosen = [f"{group}={file}" for group, file in ON_CPUS.items()]
        chosen += [f"{group}={name}" for group in groups() if (name := _file_of(group, record)) in groups()[group]]
        values = dict(_leaves(record))
        composed = compose_files(chosen)
        plain = dict(_leaves(OmegaConf.to_container(composed, resolve=False)))  # pyrefly: ignore[bad-argument-type]
        # Defaults that depend on other keys come last.
        derived = [key for key in values if "${" in str(plain.get(key))]
        pinned = {key: value for key, value in values.items() if key not in derived and value != plain.get(key, ...)}
        pinned.pop("algorithm.name", None)
        with open_dict(composed):
            for key, value in pinned.items():
                OmegaConf.update(composed, key, value, force_add=True)
        pinned |= {key: values[key] for key in derived if _resolved(composed, key) != values[key]}
        for key, value in pinned.items():
            if HIDDEN in str(value) and key not in typed:
                self._refuse(key, "is a secret, which the record omits", f"{key}=...", str(file))
        self.found += [FromFile(one, str(file)) for one in (*chosen, *(as_override(*one) for one in pinned.items()))]

    # --- One file

    def read(self, group: str, file: Path, named_at: str, above: tuple[Path, ...] = ()) -> None:
        """Add the overrides of a file, after those of its defaults list."""
        shown, resolved = str(file), file.resolve()
        if resolved in above:
            self._refuse(shown, "includes itself", "leave it out of the defaults list", named_at)
            return
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not text"
            self._refuse(shown, f"cannot be read: {reason}", _near(group, file), named_at)
            return
        values, lines = self._parsed(text, shown)
        source = _Source(file, shown, group, lines, (*above, resolved))
        package = _PACKAGE.search(text)
        section = _SECTIONS.get(group, group)
        if package and package[1] != "_group_":
            section = "" if package[1] == "_global_" else package[1].removeprefix("_global_.")
        items = values.pop("defaults", None) or []
        if not isinstance(items, list):
            self._refuse("defaults", "must be a list", "defaults: [grpo-tiny-1n0g-cpu]", source.place("defaults"))
            items = []
        if "_self_" not in items:
            items = [*items, "_self_"]
        for number, item in enumerate(items):
            if item == "_self_":
                self._add(values, section, source)
            else:
                self._add_default(item, source, source.place(f"defaults.{number}"))

    def _parsed(self, text: str, shown: str) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the values of a file, and the line of each key."""
        lines: dict[str, int] = {}
        try:
            node = yaml.compose(text, yaml.SafeLoader)
            if node is None:
                return {}, {}
            if not isinstance(node, yaml.MappingNode):
                self._refuse(shown, "must have keys", "policy.model_name: Qwen/Qwen3-0.6B, for instance", "")
                return {}, {}
            lines.update(_lines(node))
            # As Hydra reads it: 1e-4 is a number, and a key may not stand twice.
            values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{shown}, line {mark.line + 1}" if mark else shown
            tab = r"'\t'" in str(error.problem)
            fix = "indent with spaces" if tab else "correct the file there; quote special characters"
            self._refuse(shown, f"is not YAML: {error.problem}", fix, place)
            return {}, {}
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            key = str(getattr(error, "full_key", None) or "")
            place = f"{shown}, line {lines[key]}" if key in lines else shown
            self._refuse(key or shown, f"is not a value: {str(error).splitlines()[0]}", "correct the file there", place)
            return {}, {}
        return {str(key): value for key, value in values.items()}, lines  # pyrefly: ignore[missing-attribute]

    def _add(self, values: Mapping[str, Any], section: str, source: _Source) -> None:
        """Add the keys of a file."""
        for path, value in _leaves(values):
            key = f"{section}.{path}" if section else path
            if value is None and any(one.startswith(f"{key}.") for one in known_keys()):
                # All keys of the section are comments.
                continue
            place = source.place(path)
            if key == SEARCH_PATH:
                self.search(as_override(key, value), source.file.parent)
            elif _KEY.fullmatch(key):
                self.found.append(FromFile(as_override(key, value), place))
            else:
                self._refuse(
                    key, "is not a key", "write section.key: value, or keys indented below their section", place
                )

    def _add_default(self, item: Any, source: _Source, place: str) -> None:
        """Add an item of a defaults list: `name`, `group: name` or `override /group: name`."""
        group, name = source.group, item
        if isinstance(item, dict) and len(item) == 1:
            (key, name), *_ = item.items()
            group = found["group"] if (found := _ITEM.fullmatch(str(key))) else str(key)
        elif isinstance(item, str) and not names_file(item):
            head, mark, tail = item.lstrip("/").partition("/")
            group, name = (head, tail) if mark and head in groups() else (group, item.lstrip("/"))
        if name is None or name == CONFIG_NAME:
            # train.yaml is always the base.
            return
        if not isinstance(name, str):
            self._refuse("defaults", f"{item} chooses no file", "write NAME, FILE.yaml or GROUP: NAME", place)
        elif group not in groups():
            close = difflib.get_close_matches(group, groups(), n=1)
            fix = f"did you mean {close[0]}?" if close else f"choose one of: {', '.join(groups())}"
            self._refuse(group, "is not a group", fix, place)
        elif file := self._find(group, name, source.file.parent):
            self.read(group, file, place, source.above)
        else:
            # The checks of the command line report a missing file.
            self.found.append(FromFile(f"{group}={name}", place))

    def _refuse(self, key: str, rule: str, fix: str, place: str) -> None:
        self.wrong.append(Violation(key, None, rule, fix, place or None))


def _file_of(group: str, record: Mapping[str, Any]) -> str | None:
    """Return the name of the file of a record's section, if recorded."""
    section = record.get(group)
    return section.get("name") if isinstance(section, dict) else None


def _resolved(composed: DictConfig, key: str) -> Any:
    try:
        value = OmegaConf.select(composed, key)
    except (OmegaConfBaseException, ValueError):
        return ...
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _near(group: str, file: Path) -> str:
    """Return the fix for a missing file."""
    neighbours = sorted(one.name for suffix in _SUFFIXES for one in file.parent.glob(f"*{suffix}"))
    if close := difflib.get_close_matches(file.name, neighbours, n=1):
        return f"did you mean {file.with_name(close[0])}?"
    if file.stem in groups()[group]:
        return f"did you mean {group}={file.stem}?"
    return "nrl-lite init writes one"


def _leaves(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted paths and values. A mapping whose keys are not plain names is a value."""
    for name, value in node.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and all(_KEY.fullmatch(str(key)) for key in value):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _lines(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the path and the line of each key and of each item of a list of names."""
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        yield path, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, f"{path}.")
        elif isinstance(value, yaml.SequenceNode):
            yield from ((f"{path}.{number}", one.start_mark.line + 1) for number, one in enumerate(value.value))
