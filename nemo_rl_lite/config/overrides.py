"""Check a command line's overrides."""

import difflib
import os
import re
import shlex
from collections.abc import Sequence

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override

from nemo_rl_lite.config.composition import compose_files
from nemo_rl_lite.config.experiments import expanded, names_file, placed
from nemo_rl_lite.config.keys import (
    DEFAULT_ALGORITHM,
    HYDRA_PACKAGE,
    RUN_FOLDER,
    SWEEP_FOLDER,
    chooses_file,
    groups,
    instead_of_file,
    is_open,
    is_section,
    known_keys,
    parse_override,
    unknown_key,
)
from nemo_rl_lite.config.names import in_our_names
from nemo_rl_lite.errors import ConfigError, Violation


def check_overrides(arguments: Sequence[str], sweeps: bool = False) -> tuple[list[str], list[Violation]]:
    """Return the valid overrides in order, and the problems of the others.

    `key=value`, `+key=value` and `++key=value` are the same. Keys of other names become ours. A key of another
    algorithm is refused later, once the algorithm is known. A key may have several values only if the command `sweeps`.

    Raises:
        ConfigError: an experiment file cannot be read.
    """
    arguments, _ = in_our_names(expanded(arguments))
    violations: list[Violation] = []
    accepted: list[str] = []
    chosen: dict[str, str] = {}
    unknown: list[Override] = []
    known = {*known_keys(), RUN_FOLDER, SWEEP_FOLDER}
    for argument in arguments:
        override = parse_override(argument)
        if override is None:
            violations.append(Violation(argument, None, "is not an override", _as_override(argument)))
        elif problem := _problem(override, sweeps) or _chosen_again(override, chosen):
            violations.append(problem)
        elif not (chooses_file(override) or is_open(override.key_or_group) or override.key_or_group in known):
            unknown.append(override)
        elif override.key_or_group != "recipes" or override.value() is not None:
            accepted.append(_as_hydra_takes_it(argument, override))
    if unknown:
        algorithm = _algorithm([one for one in accepted if one.partition("=")[0] in ("algorithm", "recipes")])
        violations += [unknown_key(one.key_or_group, _given(one), algorithm) for one in unknown]
    return accepted, placed(violations, arguments)


def named_run_folder(arguments: Sequence[str], key: str = RUN_FOLDER) -> str | None:
    """Return the folder that overrides give to `key`, with `~` expanded; None if none does."""
    parsed = [override for override in map(parse_override, in_our_names(arguments)[0]) if override]
    named = [str(override.value()) for override in parsed if override.key_or_group == key]
    return os.path.expanduser(named[-1]) if named else None  # noqa: PTH111 - an unknown home is unchanged


def given_keys(arguments: Sequence[str]) -> list[str]:
    """Return the keys and groups that overrides set, each once."""
    parsed = [override for override in map(parse_override, in_our_names(arguments)[0]) if override]
    return list(dict.fromkeys(override.key_or_group for override in parsed))


def _algorithm(choices: Sequence[str]) -> str:
    """Return the algorithm of these files; the default one if they cannot be composed."""
    if not choices:
        return DEFAULT_ALGORITHM
    try:
        return compose_files(choices).algorithm.name
    except ConfigError:
        return DEFAULT_ALGORITHM


def _given(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]


def _as_hydra_takes_it(argument: str, override: Override) -> str:
    key = override.key_or_group
    if key in (RUN_FOLDER, SWEEP_FOLDER):
        folder = named_run_folder([argument], key) or ""
        # Hydra would make a folder called ~.
        at_home = str(override.value()).startswith("~")
        return "{}='{}'".format(key, folder.replace("'", "\\'")) if at_home else argument.lstrip("+")
    return ("++" if key not in groups() else "") + argument.lstrip("+")


def _as_override(argument: str) -> str:
    """Return the fix for an argument that cannot be parsed: its value in quotes, if that helps."""
    key, _, value = argument.partition("=")
    text = value.replace("'", r"\'")
    quoted = f"{key}='{text}'"
    if value and parse_override(quoted) is not None:
        shown = shlex.quote(quoted) if re.search(r'["$`!]|\\\\', quoted) else f'"{quoted}"'
        return f"quote special characters: {shown}"
    return "write key.path=value (without spaces) or group=file, and quote special characters: \"key.path='value'\""


def _problem(override: Override, sweeps: bool) -> Violation | None:
    """Return the problem of an override, apart from an unknown key."""
    key, given = override.key_or_group, _given(override)
    if override.is_sweep_override() and not sweeps:
        fix = f"'{key}=[{given}]' for a list, quotes for a text, or nrl-lite train -m for a sweep"
        return Violation(key, given, "has several values", fix)
    section = key.split(".")[0]
    if section == HYDRA_PACKAGE or section.startswith(f"{HYDRA_PACKAGE}/"):
        return _hydra_problem(override, key, given, sweeps)
    if override.package is not None:
        return Violation(override.input_line or key, None, "has a package", "write key.path=value or group=file")
    if chooses_file(override):
        return _group_problem(override)
    if override.is_delete():
        return Violation(key, None, "deletes a required key", "set it to null if that is allowed")
    if key == "algorithm.name":
        return Violation(key, given, "is set by algorithm=FILE", f"algorithm={given}")
    has_keys = is_section(key) or any(one.startswith(f"{key}.") for one in known_keys())
    if has_keys and isinstance(override.value(), list):
        return Violation(key, given, "is a section, not a list", f"{key}.NAME=..., one override for each of its keys")
    return None


def _hydra_problem(override: Override, key: str, given: str, sweeps: bool) -> Violation | None:
    """Return the problem of an override of Hydra's section. Only the folders may be set."""
    if key not in (RUN_FOLDER, SWEEP_FOLDER):
        return Violation(key, given, "is not supported", f"{RUN_FOLDER}=FOLDER, or with -m {SWEEP_FOLDER}=FOLDER")
    if "://" in given:
        rule = "is an address, and a run needs a folder that all nodes see"
        return Violation(key, given, rule, f"{key}=outputs/my-run, and copy it afterwards")
    if sweeps and key == RUN_FOLDER:
        return Violation(key, given, "is one folder, and a sweep needs several", f"{SWEEP_FOLDER}={given}")
    if override.is_sweep_override():
        return Violation(key, given, "has several folders, and a sweep needs one", f"{key}={given.split(',')[0]}")
    if not sweeps and key == SWEEP_FOLDER:
        return Violation(key, given, "applies to sweeps (-m)", f"{RUN_FOLDER}={given}")
    return None


def _group_problem(override: Override) -> Violation | None:
    group = override.key_or_group
    files = groups()[group]
    if override.is_delete():
        return Violation(group, None, "deletes a required section", f"{group}=FILE")
    for name in _files(override):
        # Each job of a sweep reads its own file.
        if (
            name in files
            or (group == "recipes" and name is None)
            or (override.is_sweep_override() and names_file(name))
        ):
            continue
        close = difflib.get_close_matches(str(name).lower(), files, n=1, cutoff=0.7)
        listing = ", ".join(files) or "none"
        hint = instead_of_file(group, name) or (f"did you mean {group}={close[0]}?" if close else "")
        # The names of all recipes would hide the hint.
        all_files = "" if group == "recipes" else f"; files: {listing}"
        fix = f"{hint}{all_files}" if hint else f"choose one of: {listing}"
        return Violation(group, name, f"no such file in the group '{group}'", fix)
    return None


def _chosen_again(override: Override, chosen: dict[str, str]) -> Violation | None:
    """Return a problem if an earlier override has chosen another file of the same group."""
    if not chooses_file(override):
        return None
    group, name = override.key_or_group, str(override.value())
    first = chosen.setdefault(group, name)
    if first == name:
        return None
    return Violation(group, name, f"is chosen twice: {first} and {name}", f"keep one {group}=...")


def _files(override: Override) -> list[str | None]:
    """Return the files of a `group=file` override; a sweep has several."""
    choice = override.value()
    if isinstance(choice, Glob):
        return list(choice.filter(groups()[override.key_or_group]))
    if isinstance(choice, ChoiceSweep):
        return [str(element) for element in choice.list]
    return [None if choice is None else str(choice)]
