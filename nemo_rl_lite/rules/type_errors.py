"""What pydantic finds wrong with types and ranges, in this project's words."""

from collections.abc import Sequence

from pydantic_core import ErrorDetails

from nemo_rl_lite.config.keys import DEFAULT_ALGORITHM, groups, unknown_key
from nemo_rl_lite.config.sections.types import DURATION, RUN_NAME, USER_CODE
from nemo_rl_lite.errors import Violation

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
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}
_FILES = ("data.train_path", "data.validation_path")
# What a pattern of the schema stands for.
_PATTERNS = {
    RUN_NAME: "must be the name of a folder: at most 200 letters, no slash, and no space or dot in front",
    USER_CODE: "must be a dotted path (package.module.Class) or a file (path/to/file.py:Class)",
    DURATION: "must be a duration: [[days:]hours:]minutes:seconds",
}


def described(details: ErrorDetails, known: Sequence[str], algorithm: str = DEFAULT_ALGORITHM) -> Violation:
    """Return the violation that an error of pydantic is, by its key. `known`: the keys that there are."""
    location = [str(part) for part in details["loc"]]
    if location[0] == "algorithm":
        del location[1:2]  # pydantic's name of the variant
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    if kind not in ("unexpected_keyword_argument", "missing") and ".".join(location) not in known:
        # pydantic adds the name of the type that the value might have had.
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
        return Violation(key, given, "must be the name of a file", f"{key}='data/*.jsonl' for several")
    given = "null" if given is None else given
    fix = f"choose one of: {expected}" if expected else f"set {key} to a value that {_is(rule)}"
    return Violation(key, given, rule, f"set {key} to such a value" if "pattern" in context else fix)


def _is(rule: str) -> str:
    return rule.replace("must be", "is", 1).replace("must not be", "is not", 1)


def merged(violations: Sequence[Violation]) -> list[Violation]:
    """One violation a key: where a value may be of several types, pydantic reports each that it is not."""
    found: dict[str, Violation] = {}
    for one in violations:
        first = found.get(one.key)
        rule = one.rule if first is None else f"{first.rule}, or {one.rule.removeprefix('must be ')}"
        fix = one.fix if first is None else f"set {one.key} to one of these"
        found[one.key] = Violation(one.key, one.value, rule, fix)
    return list(found.values())


def is_of_variant(details: ErrorDetails) -> bool:
    """Whether the error is that no variant of a section is named."""
    return details["type"].startswith("union_tag")
