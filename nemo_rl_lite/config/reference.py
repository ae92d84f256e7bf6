"""Describe every key: types, ranges and choices from the schema, sentences and defaults from configs/.

A key or a file without a comment is an error. A comment is Markdown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from nemo_rl_lite.config.keys import config_dir, groups
from nemo_rl_lite.config.schema import Config

Schema = Mapping[str, Any]
RECIPES, ALGORITHM = "recipes", "algorithm"
# This group fills another section.
SECTION_OF = {"offload": "policy"}
# Algorithms with most keys of another; the page shows the others.
EXTENDS = {"distillation": "grpo", "dpo": "sft", "orpo": "sft", "kto": "sft"}
FIRST_KEYS = """
policy.model_name data.train_path data.path data.prompt_column data.answer_column reward.name
algorithm.num_prompts_per_step algorithm.num_generations_per_prompt algorithm.max_num_steps
policy.train_global_batch_size policy.megatron_cfg.optimizer.lr policy.megatron_cfg.peft.enabled
algorithm.loss_fn.reference_policy_kl_penalty generation.max_new_tokens policy.max_total_sequence_length
cluster.gpus_per_node policy.megatron_cfg.tensor_model_parallel_size algorithm.val_period checkpoint.save_period
logger.wandb_enabled
"""


class UndocumentedError(Exception):
    """A key or a file of configs/ has no comment."""


@dataclass(frozen=True)
class Entry:
    """One key: type and range in words, default and sentence, as Markdown."""

    key: str
    kind: str
    default: str
    sentence: str


# --- The page


def page() -> str:
    """Return docs/configuration.md."""
    known = {one.key: one for one in entries()}
    first = _table([known[key] for key in FIRST_KEYS.split()])
    parts = [INTRODUCTION, FIRST_TITLE + first, _groups(), _recipes()]
    parts += ["## Top level", _table(_entries(_schema(), "", "train"))]
    for section, node in _schema()["properties"].items():
        if section == ALGORITHM:
            parts += _algorithms()
            parts.append(_files(ALGORITHM, [name for name in groups()[ALGORITHM] if name not in _variants()]))
        elif "$ref" in node:
            parts += [part for path, found in _walk(section, node) for part in _section(path, found)]
            parts += [_files(group) for group in groups() if SECTION_OF.get(group, group) == section]
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n\n".join(filter(None, parts))) + "\n"


def entries() -> Iterator[Entry]:
    """Yield every key once, and the arguments that files of a group document."""
    found = [*_entries(_schema(), "", "train")]
    for section, node in _schema()["properties"].items():
        variants = _variants() if section == ALGORITHM else {None: node} if "$ref" in node else {}
        found += [one for file, variant in variants.items() for _, own in _walk(section, variant, file) for one in own]
    found += [one for group in groups() if group != RECIPES for one in _arguments(group)]
    first: dict[str, Entry] = {}
    for one in found:
        first.setdefault(one.key, one)
    yield from first.values()


def _algorithms() -> Iterator[str]:
    shown: dict[str, set[Entry]] = {}
    for name, variant in _variants().items():
        base = EXTENDS.get(name)
        yield f"## {ALGORITHM}={name}"
        yield _header(ALGORITHM, name)
        if base:
            yield f"The keys of [`{ALGORITHM}={base}`](#{ALGORITHM}{base}), except for:"
        for path, found in _walk(ALGORITHM, variant, name):
            shown.setdefault(name, set()).update(found)
            own = [one for one in found if one not in shown.get(base or "", ())]
            yield from [part for part in _section(path, own, name) if path != ALGORITHM or part.startswith("|")]


def _section(path: str, found: Sequence[Entry], file: str | None = None) -> Iterator[str]:
    """Yield a heading, the section's comment and a table of its keys."""
    if found:
        yield f"{'#' * (2 + path.count('.'))} {path}"
        if "." in path:
            yield _comment(path, file)
        elif len(groups()[path]) == 1:
            yield _header(path, default_file(path))
        yield _table(found)


def _table(found: Sequence[Entry]) -> str:
    # Keys are long, so type and default stand below them.
    rows = [(f"`{one.key}`<br>{one.kind}<br>default: {one.default}", one.sentence) for one in found]
    return table(("key", "description"), rows)


def _groups() -> str:
    rows = []
    for group in filter(lambda group: group != RECIPES, groups()):
        others = ", ".join(f"`{file}`" for file in groups()[group] if file != default_file(group))
        rows.append((f"`{group}`", f"`{SECTION_OF.get(group, group)}`", f"`{default_file(group)}`", others))
    return "## Groups\n\n" + table(("group", "section", "default file", "other files"), rows)


def _files(group: str, names: Sequence[str] = ()) -> str:
    """Describe the files of a group, or those named: purpose, values that are not the default's, and arguments."""
    if len(groups()[group]) == 1:
        return ""
    default, found = default_file(group), [*_arguments(group)]
    arguments, rows = [one.key for one in found], []
    for file in sorted(names or groups()[group], key=lambda name: (name != default, name)):
        changed = [
            f"`{key}`: {shown(values(group, file), key)}"
            for key, value in values(group, file).items()
            if value != values(group, default).get(key, ...)
            and not isinstance(value, dict)
            and key not in arguments
            and (key, value) != (f"{group}.name", file)
        ]
        rows.append((f"`{group}={file}`", _header(group, file), "<br>".join(changed) or "the defaults"))
    text = f"### Files of the group {group}\n\n" + table(("choice", "purpose", "sets"), rows)
    return f"{text}\n\nTheir arguments:\n\n{_table(found)}" if found else text


def _arguments(group: str) -> Iterator[Entry]:
    """Yield the commented keys of a group's files that the schema leaves open, such as those of a reward."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in groups()[group]:
        for key, comment in read_comments(config_dir() / group / f"{file}.yaml").keys.items():
            if "kwargs." in key:
                found.setdefault((f"{group}.{key}", comment), []).append(file)
    for (key, comment), files in found.items():
        choices = "with " + ", ".join(f"`{group}={file}`" for file in files)
        yield Entry(key, choices, shown(values(group, files[0]), key), comment)


def _recipes() -> str:
    rows = []
    for name in groups()[RECIPES]:
        what, mark, run = _header(RECIPES, name).partition("Run: ")
        if not (what and mark):
            raise UndocumentedError(f"recipes/{name}.yaml: its comment must have a purpose, then `Run: WHERE`")
        config = {**_defaults(), **values(RECIPES, name)}
        place = f"{config['cluster.num_nodes']} x {config['cluster.gpus_per_node']}"
        rows.append((f"`{name}`", what, f"`{config['policy.model_name']}`", place, run.rstrip(".")))
    return RECIPES_TITLE + table(("recipe", "purpose", "model", "nodes x GPUs", "run"), rows)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *([_cell(one) for one in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def _cell(text: str) -> str:
    """Escape a bar, which ends a cell, and a tag outside code."""
    return re.sub(r"(`[^`]*`|<br>)|<", lambda found: found[1] or "&lt;", text.replace("|", "\\|"))


# --- Keys


@cache
def _schema() -> Schema:
    return TypeAdapter(Config).json_schema()


@cache
def _variants() -> Mapping[str, Schema]:
    """Return each algorithm's part of the schema."""
    variants = _schema()["properties"][ALGORITHM]["oneOf"]
    return {_resolve(one)["properties"]["name"]["const"]: one for one in variants}


def _resolve(node: Schema) -> Schema:
    return _schema()["$defs"][node["$ref"].rpartition("/")[2]]


def _walk(path: str, node: Schema, file: str | None = None) -> Iterator[tuple[str, list[Entry]]]:
    """Yield a section and its keys, then its subsections."""
    yield path, _entries(_resolve(node), path, file)
    for name, child in _resolve(node)["properties"].items():
        if "$ref" in child:
            yield from _walk(f"{path}.{name}", child, file)


def _entries(node: Schema, path: str, file: str | None) -> list[Entry]:
    """Return the keys of a section, without those of its subsections, in the order of configs/."""
    defaults = values(ALGORITHM, file) if file and path.split(".")[0] == ALGORITHM else _defaults()
    order = [key.rpartition(".")[2] for key in defaults if key.rpartition(".")[0] == path]
    names = [name for name, child in node["properties"].items() if "$ref" not in child and "oneOf" not in child]
    return [
        Entry(key, kind(node["properties"][name]), shown(defaults, key), _comment(key, file))
        for name in sorted(names, key=lambda name: (name != "name", order.index(name)))
        for key in [f"{path}.{name}".lstrip(".")]
    ]


def _comment(key: str, file: str | None) -> str:
    """Return the comment of a key in configs/: in `file` or the files that it is laid over, or in any of its group."""
    section, _, rest = key.partition(".")
    places = [("train.yaml", key)]
    if rest:
        places = [
            (str(path.relative_to(config_dir())), rest)
            for group in groups()
            if SECTION_OF.get(group, group) == section
            for path in (reversed(_layers(config_dir() / group / f"{file}.yaml")) if file else _of_group(group))
        ]
    for name, path in places:
        if comment := read_comments(config_dir() / name).keys.get(path):
            return comment
    raise UndocumentedError(f"{key}: no comment above it in {' or '.join(name for name, _ in places)}")


def _layers(path: Path) -> list[Path]:
    """Return the files that a file is laid over, in order, then the file."""
    bases = [
        path.parent / f"{one.partition('@')[0]}.yaml" for one in _yaml(path).get("defaults", []) if isinstance(one, str)
    ]
    return [*(below for base in bases if base.exists() for below in _layers(base)), path]


def _of_group(group: str) -> list[Path]:
    """Return the files of a group: shared ones, the default, the others."""
    folder = config_dir() / group
    return sorted(folder.rglob("*.yaml"), key=lambda one: (one.parent == folder, one.stem != default_file(group), one))


@cache
def values(group: str, file: str) -> Mapping[str, Any]:
    """Return every key that a file of a group sets, sections included, with its unresolved value."""
    section = "" if group == RECIPES else f"{SECTION_OF.get(group, group)}."
    layers = [_yaml(path) for path in _layers(config_dir() / group / f"{file}.yaml")]
    return {key: value for layer in layers for key, value in _leaves(layer, section) if key != f"{section}defaults"}


@cache
def _defaults() -> Mapping[str, Any]:
    """Return every key with its default."""
    found = dict(_leaves(_yaml(config_dir() / "train.yaml")))
    for group in sorted({*groups()} - {RECIPES}, key=lambda group: (group in SECTION_OF, group)):
        found |= values(group, default_file(group))
    return found


@cache
def _yaml(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text()) or {}


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")


# --- Types and defaults in words

TYPES = {
    "integer": "integer",
    "number": "number",
    "boolean": "`true` or `false`",
    "string": "string",
    "object": "mapping",
    "null": "`null`",
}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
# Defaults that depend on other keys; {own} is mostly that of the embedded model, {other} that of all others.
_RESOLVED = re.compile(r"\$\{default_(\w+):\$\{[\w.]+\},(?P<own>[^,}]+)(?:,(?P<other>[^,}]+))?.*\}")
_BY_RESOLVER = {
    "length": "`{other}`, or the model's positions if fewer; `{own}` for the embedded model",
    "response": "`{other}`, or half of `policy.max_total_sequence_length` if less; `{own}` for the embedded model",
    "micro_batch": "`{other}` / `policy.max_total_sequence_length`, at least 1; `{own}` for the embedded model",
    "rate": "`{other}`; `5.0e-6` with SFT; `{own}` with LoRA or the embedded model",
    "batch": "all samples of a rollout; `{own}` with SFT, DPO, ORPO, KTO or the embedded model",
    "for": "`{other}`; `{own}` for the embedded model",
    "fraction": "`{own}`, or `0` without validation",
    "steps": "`{own}`; `null` with `max_num_epochs` for finite data",
    "buffer": "1/{own} of `generation.max_new_tokens`",
}
_VARIABLE = re.compile(r"\$\{(?:oc\.decode:\$\{oc\.env|variable):(\w+),([^}]*)\}+")


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
    ranges = [f"{sign} {node[limit]}" for limit, sign in LIMITS.items() if limit in node]
    return " ".join([node.get("description") or TYPES[node["type"]], " and ".join(ranges)]).strip()


def shown(defaults: Mapping[str, Any], key: str) -> str:
    """Return a default in words."""
    text = raw(defaults[key])
    if text == "???":
        return "required"
    if found := _VARIABLE.fullmatch(text):
        return f"`{found[2]}`, or the variable `{found[1]}`"
    if found := _RESOLVED.fullmatch(text):
        return _BY_RESOLVER[found[1]].format(**found.groupdict())
    if found := re.fullmatch(r"\$\{(\.?)([\w.]+)\}", text):
        return f"value of `{key.rpartition('.')[0] + '.' if found[1] else ''}{found[2]}`"
    return f"`{text}`"


def raw(value: Any) -> str:
    """Return a value as YAML on one line; of a text with several lines, the first."""
    if isinstance(value, str):
        return " ".join([*value.splitlines()[:1], *["..."] * ("\n" in value)])
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("\n").removesuffix("\n...")


# --- Comments of YAML files


@dataclass
class Comments:
    """The comments of a file: about the file, and about each key (dotted path within the file)."""

    header: str
    keys: dict[str, str]


@cache
def read_comments(file: Path) -> Comments:
    """Read a file's comments. A comment belongs to the key directly below it; the first one belongs to the file if a
    blank line or `defaults:` follows it."""
    text = file.read_text()
    lines = text.splitlines()
    end = next((place for place, line in enumerate(lines) if not line.startswith("#")), len(lines))
    about_file = end < len(lines) and (not lines[end].strip() or lines[end].startswith("defaults:"))
    header = _joined([line for line in lines[:end] if "@package" not in line]) if about_file else ""
    root = yaml.compose(text)
    return Comments(header, dict(_visit(root, "", lines)) if isinstance(root, yaml.MappingNode) else {})


def _visit(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    for key, value in node.value:
        end, path = key.start_mark.line, f"{prefix}{key.value}"
        start = end
        while start and lines[start - 1].lstrip().startswith("#"):
            start -= 1
        comment = _joined(lines[start:end])
        if comment and path != "defaults":
            yield path, comment
        if isinstance(value, yaml.MappingNode):
            yield from _visit(value, f"{path}.", lines)


def _joined(lines: list[str]) -> str:
    """Join a comment into one line. A line that is indented deeper is a command and becomes code."""
    words = [line.strip().removeprefix("#") for line in lines]
    return " ".join(f"`{line.strip()}`" if line.startswith("   ") else line.strip() for line in words).strip()


def _header(group: str, file: str) -> str:
    header = read_comments(config_dir() / group / f"{file}.yaml").header
    if not header:
        raise UndocumentedError(f"configs/{group}/{file}.yaml: no comment at its top, with a blank line below it")
    return header


def default_file(group: str) -> str:
    """Return the name of a group's default file."""
    listed = _yaml(config_dir() / "train.yaml")["defaults"]
    return {name: file for item in listed if isinstance(item, dict) for name, file in item.items()}[group]


INTRODUCTION = """# Configuration reference

<!-- Written by scripts/config_reference.py from configs/ and the schema in nemo_rl_lite/config/. Change those. -->

Hydra composes one file of each group. On the command line, `group=file` chooses a file and `key.path=value` sets a key:

```bash
nrl-lite train algorithm=sft policy.megatron_cfg.optimizer.lr=1e-4
```

- `nrl-lite keys WORD` searches this page.
- `source <(nrl-lite --completion bash)`, or `zsh`, completes keys, files and choices with Tab.
- `nrl-lite train --cfg job` prints the composed configuration and starts nothing.
- `hydra.run.dir=FOLDER` names the run's folder.
- `${a.b}` in a value stands for the value of another key.
- `key=value` and `+key=value` mean the same.

All unknown keys, values out of range and contradictions are reported at once, before anything starts. A key without
an effect in the run prints a note.

`-m algorithm.seed=1,2,3` is a sweep: one run per value, sequentially, in numbered folders below `hydra.sweep.dir`. All
are checked before the first one starts. A failed run does not end the sweep. The exit status is that of the first
failure. An interrupted run (130), or one that stopped with a checkpoint (75), ends the sweep."""
FIRST_TITLE = """## First keys

Most runs need no others. Defaults are GRPO's; other algorithms differ where noted below.

"""
RECIPES_TITLE = """## Recipes

A recipe is a complete experiment: `recipes=NAME`. Keys on the command line override it. A recipe with 0 GPUs runs on
CPUs.

"""
