"""Show types, values and comments of the configuration as Markdown."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Schema = Mapping[str, Any]


def kind(node: Schema) -> str:
    """Return a key's type and range in words."""
    if "anyOf" in node:
        return " or ".join(kind(choice) for choice in node["anyOf"])
    if "enum" in node:
        return ", ".join(f"`{choice}`" for choice in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    if node["type"] == "array":
        return f"list of {kind(node['items'])}"
    words = TYPES[node["type"]]
    ranges = [f"{sign} {node[limit]}" for limit, sign in LIMITS.items() if limit in node]
    if "pattern" in node:
        # A bar ends a cell of a table.
        ranges.append(f"like `{node['pattern'].replace('|', '\\|')}`")
    return " ".join([words, " and ".join(ranges)]).strip()


TYPES = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "object": "mapping",
    "null": "null",
}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
# Defaults that depend on the model: of the embedded one, and what the resolver makes of the number for others.
OF_MODEL = re.compile(r"\$\{default_(\w+):\$\{[\w.]+\},([^,]+),([^,}]+).*\}")
OTHERS = {
    "length": "`{}`, or all positions where they are fewer",
    "response": "`{}`, or half of `policy.max_total_sequence_length` where that is fewer",
    "micro_batch": "as many as have `{}` tokens by `policy.max_total_sequence_length`, at least one",
    "rate": "`{}`, with SFT `5.0e-6`, or as for the embedded one where adapters are trained",
    "batch": "a whole rollout, and as for the embedded one where no engine generates; less for fewer rows or samples",
    "for": "`{}`",
}
ENVIRONMENT = re.compile(r"\$\{(?:oc\.decode:\$\{oc\.env|variable):(\w+),([^}]*)\}+")


def shown(defaults: Mapping[str, Any], key: str) -> str:
    """Return a default as the page shows it."""
    text = raw(defaults[key])
    if found := ENVIRONMENT.fullmatch(text):
        return f"`{found[2]}`, or the environment's `{found[1]}`"
    if found := re.fullmatch(r"\$\{default_fraction:.*,(.*)\}", text):
        return f"`{found[1]}`, or 0 where it has no effect"
    if found := re.fullmatch(r"\$\{default_steps:.*,(.*)\}", text):
        return f"`{found[1]}`, or `null` with `max_num_epochs`"
    if found := OF_MODEL.fullmatch(text):
        return f"`{found[2]}` for the embedded model; for others {OTHERS[found[1]].format(found[3])}"
    if found := re.fullmatch(r"\$\{(\.?)([\w.]+)\}", text):
        return f"that of `{key.rpartition('.')[0] + '.' if found[1] else ''}{found[2]}`"
    return f"`{text}`"


def raw(value: Any) -> str:
    """Return a value as YAML, on one line: of a text with several, the first."""
    if isinstance(value, str):
        return " ".join([*value.splitlines()[:1], *["..."] * ("\n" in value)])
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("\n").removesuffix("\n...")


# These words become code: settings, names with an underscore, dotted names, files, folders.
CODE = re.compile(
    r"`[^`]*`|'[^' ]*=[^']*'|(?<![\w/.`])(?:"
    r"[\w./]*\w=[^\s,;)]+|[\w.*-]+/(?![\w-]+:)[^\s,;:)]*|[\w.]*\w_\w[\w./]*|[a-z]\w+(?:\.[a-z]\w+)+|\*\.\w+)"
)


def prose(comment: str) -> str:
    """Return a comment as Markdown on one line, fit for a table."""

    def code(found: re.Match[str]) -> str:
        words = found[0].strip("`").rstrip(".:")
        return f"`{words}`{found[0].strip('`')[len(words) :]}"

    return CODE.sub(code, comment.strip()).replace("|", "\\|").replace("<", "&lt;")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""
