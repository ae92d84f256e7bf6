"""The command line's overrides: which of them Hydra can take, and readable errors for the others."""

import difflib
import os
import re
import shlex
from collections.abc import Sequence

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override

from nemo_rl_lite.config.keys import (
    HYDRA_PACKAGE,
    RUN_FOLDER,
    SWEEP_FOLDER,
    chooses_file,
    groups,
    is_open,
    is_section,
    known_keys,
    parse_override,
    unknown_key,
)
from nemo_rl_lite.errors import ConfigError, Violation


def check_overrides(arguments: Sequence[str], sweeps: bool = False) -> tuple[list[str], list[Violation]]:
    """Split the command line's overrides into those Hydra can take, in order, and what is wrong with the others.

    `+key=value` becomes `key=value` where the key exists, and the reverse where it does not and the section is open. An
    unknown key, group or file is answered with the nearest known one. Only where it `sweeps` may a key have several
    values.
    """
    violations: list[Violation] = []
    accepted: list[str] = []
    chosen: dict[str, str] = {}
    known = _known_keys([override for override in map(parse_override, arguments) if override])
    for argument in arguments:
        override = parse_override(argument)
        if override is None:
            violations.append(Violation(argument, None, "is not an override", _as_override(argument)))
            continue
        problem = _override_problem(override, known, sweeps) or _chosen_again(override, chosen)
        if problem:
            violations.append(problem)
        elif override.key_or_group != "recipes" or override.value() is not None:
            accepted.append(_as_hydra_takes_it(argument, override.key_or_group))
    return accepted, violations


def named_run_folder(arguments: Sequence[str], key: str = RUN_FOLDER) -> str | None:
    """The run's folder (or with another `key`, the sweep's), where valid overrides name it: without `~`, and with
    `${...}` as it stands there."""
    parsed = [override for override in map(parse_override, arguments) if override]
    named = [str(override.value()) for override in parsed if override.key_or_group == key]
    return os.path.expanduser(named[-1]) if named else None  # noqa: PTH111 - an unknown home stays as it is


def given_keys(arguments: Sequence[str]) -> list[str]:
    """The keys and groups that overrides set, each once."""
    parsed = [override for override in map(parse_override, arguments) if override]
    return list(dict.fromkeys(override.key_or_group for override in parsed))


def chosen_file(arguments: Sequence[str], group: str) -> str | None:
    """The file of a group that valid overrides choose, if they choose one."""
    chosen = [one for one in map(parse_override, arguments) if one and chooses_file(one) and one.key_or_group == group]
    return str(chosen[-1].value()) if chosen else None


def _known_keys(overrides: Sequence[Override]) -> list[str]:
    """The keys of the files that are chosen; in a sweep, of all that it chooses."""
    chosen = [override for override in overrides if chooses_file(override) and not _group_problem(override)]
    fixed = {override.key_or_group: _files(override)[0] for override in chosen if not override.is_sweep_override()}
    swept = [{o.key_or_group: file} for o in chosen if o.is_sweep_override() for file in _files(o)]
    keys: dict[str, None] = {}
    for choice in [{}, *swept]:
        try:
            files = tuple(f"{group}={file}" for group, file in (fixed | choice).items() if file is not None)
            keys |= dict.fromkeys(known_keys(files))
        except ConfigError:  # a recipe that does not compose; the run's own composition says why
            keys |= dict.fromkeys(known_keys())
    return list(keys)


def _as_hydra_takes_it(argument: str, key: str) -> str:
    if key.startswith(HYDRA_PACKAGE):
        override, folder = parse_override(argument), named_run_folder([argument], key) or ""
        is_at_home = override is not None and str(override.value()).startswith("~")
        # Hydra would make a folder called ~.
        return "{}='{}'".format(key, folder.replace("'", "\\'")) if is_at_home else argument
    return ("++" if is_open(key) else "") + argument.lstrip("+")


def _as_override(argument: str) -> str:
    """The fix for what Hydra cannot read: where its value in quotes is an override, that as a shell takes it."""
    key, _, value = argument.partition("=")
    text = value.replace("'", r"\'")
    quoted = f"{key}='{text}'"
    if value and parse_override(quoted) is not None:
        shown = shlex.quote(quoted) if re.search(r'["$`!]|\\\\', quoted) else f'"{quoted}"'
        return f"quote a value with unusual letters: {shown}"
    return "write key.path=value or group=file; quote a value with unusual letters: \"key.path='value'\""


def _override_problem(override: Override, known: Sequence[str], sweeps: bool) -> Violation | None:
    key = override.key_or_group
    given = (override.input_line or "").partition("=")[2]
    if override.is_sweep_override() and not sweeps:
        fix = f"'{key}=[{given}]' for a list, quotes for a text, or nrl-lite train -m for a run with each"
        return Violation(key, given, "gives several values", fix)
    section = key.split(".")[0]
    if section == HYDRA_PACKAGE or section.startswith(f"{HYDRA_PACKAGE}/"):
        return _hydra_problem(override, key, given, sweeps)
    if override.package is not None:
        return Violation(override.input_line or key, None, "gives a package", "write key.path=value or group=file")
    if chooses_file(override):
        return _group_problem(override)
    if override.is_delete():
        return Violation(key, None, "deletes a key, and every key is needed", "set it to null where it may be empty")
    if key == "algorithm.name":
        return Violation(key, given, "is set by the algorithm's file", f"algorithm={given}")
    if isinstance(override.value(), list) and (is_section(key) or any(one.startswith(f"{key}.") for one in known)):
        return Violation(key, given, "is a section, and no list", f"{key}.NAME=..., one override for each of its keys")
    if key in known or is_open(key):
        return None
    return unknown_key(key, given, known)


def _hydra_problem(override: Override, key: str, given: str, sweeps: bool) -> Violation | None:
    """Folders are what a command may say to Hydra."""
    if key not in (RUN_FOLDER, SWEEP_FOLDER):
        fix = f"{RUN_FOLDER}=FOLDER, or with -m {SWEEP_FOLDER}=FOLDER"
        return Violation(key, given, "is no setting of this launcher", fix)
    if "://" in given:
        rule = "is an address, and runs are written to folders that all nodes see"
        return Violation(key, given, rule, f"{key}=outputs/my-run, and copy it afterwards")
    if sweeps and key == RUN_FOLDER:
        return Violation(key, given, "is one folder, and a sweep has several runs", f"{SWEEP_FOLDER}={given}")
    if override.is_sweep_override():
        return Violation(key, given, "names several folders, and a sweep has one", f"{key}={given.split(',')[0]}")
    if not sweeps and key == SWEEP_FOLDER:
        return Violation(key, given, "is for sweeps (-m)", f"{RUN_FOLDER}={given}")
    return None


def _group_problem(override: Override) -> Violation | None:
    group = override.key_or_group
    files = groups()[group]
    if override.is_delete():
        return Violation(group, None, "deletes a section, and every section is needed", f"{group}=FILE")
    for name in _files(override):
        if name in files or (group == "recipes" and name is None):
            continue
        close = difflib.get_close_matches(str(name), files, n=1, cutoff=0.4)
        listing = ", ".join(files) or "none"
        hint = f"did you mean {group}={close[0]}? files: {listing}" if close else f"choose one of: {listing}"
        return Violation(group, name, f"no such file in the group '{group}'", hint)
    return None


def _chosen_again(override: Override, chosen: dict[str, str]) -> Violation | None:
    """A problem where an earlier override, which this one would replace, has chosen a file of the same group."""
    if not chooses_file(override):
        return None
    group, name = override.key_or_group, str(override.value())
    first = chosen.setdefault(group, name)
    if first == name:
        return None
    return Violation(group, name, f"is chosen twice: {first} and {name}", f"keep one {group}=...")


def _files(override: Override) -> list[str | None]:
    """What a `group=file` override chooses, several in a sweep."""
    choice = override.value()
    if isinstance(choice, Glob):
        return list(choice.filter(groups()[override.key_or_group]))
    if isinstance(choice, ChoiceSweep):
        return [str(element) for element in choice.list]
    return [None if choice is None else str(choice)]
