"""Describe every key: schema (types, ranges, choices) and configs/ (comments, defaults, files) as rows and as a page.

A key or a file without a comment is an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from nemo_rl_lite.config.comments import UndocumentedError, read_comments
from nemo_rl_lite.config.composition import compose_files
from nemo_rl_lite.config.key_words import Schema, kind, prose, raw, shown, table
from nemo_rl_lite.config.keys import config_dir, groups
from nemo_rl_lite.config.schema import Config

RECIPES, ALGORITHM = "recipes", "algorithm"
# This group puts its keys into another section.
SECTION_OF = {"offload": "policy"}


@dataclass(frozen=True)
class Entry:
    """One key: type and range in words, default and sentence as Markdown."""

    key: str
    kind: str
    default: str
    sentence: str


@dataclass(frozen=True)
class Reference:
    """Builds the page from one folder of groups."""

    folder: Path
    schema: Schema

    @classmethod
    def of_package(cls) -> "Reference":
        return cls(config_dir(), TypeAdapter(Config).json_schema())

    def page(self) -> str:
        parts = [INTRODUCTION, self._groups(), self._recipes(), "## Top level", self._table(self.schema, "", "train")]
        for section in self.schema["properties"]:
            if section == ALGORITHM:
                variants = self.schema["properties"][section]["oneOf"]
                own = {self._resolve(variant)["properties"]["name"]["const"]: variant for variant in variants}
                for name, variant in own.items():
                    parts += self._section(section, variant, f"{ALGORITHM}={name}", name)
                parts.append(self._files(ALGORITHM, [name for name in groups()[ALGORITHM] if name not in own]))
            elif "$ref" in self.schema["properties"][section]:
                parts += self._section(section, self.schema["properties"][section], section, None)
                parts += [self._files(group) for group in groups() if SECTION_OF.get(group, group) == section]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _section(self, path: str, node: Schema, title: str, file: str | None) -> Iterator[str]:
        """Yield a heading, the section's comment and a table of its keys; then the same for its subsections."""
        depth = "#" * (2 + path.count("."))
        resolved = self._resolve(node)
        yield f"{depth} {title}"
        yield prose(self._about_section(path, file))
        yield self._table(resolved, path, file)
        for name, child in resolved["properties"].items():
            if "$ref" in child:
                yield from self._section(f"{path}.{name}", child, f"{path}.{name}", file)

    def _about_section(self, path: str, file: str | None) -> str:
        """Return the section's comment; nothing where the group's files differ, since a table describes them."""
        if "." in path:
            return self._comment(path, file)
        return self._header(path, file or self._default_file(path)) if file or len(groups()[path]) == 1 else ""

    def entries(self) -> Iterator[Entry]:
        """Yield every key; one of several algorithms once."""
        seen: set[str] = set()
        for one in self._all_entries():
            if one.key not in seen:
                seen.add(one.key)
                yield one

    def _all_entries(self) -> Iterator[Entry]:
        yield from self._entries(self.schema, "", "train")
        for section, node in self.schema["properties"].items():
            if section == ALGORITHM:
                for variant in node["oneOf"]:
                    file = self._resolve(variant)["properties"]["name"]["const"]
                    yield from self._entries_below(section, variant, file)
            elif "$ref" in node:
                yield from self._entries_below(section, node, None)

    def _entries_below(self, path: str, node: Schema, file: str | None) -> Iterator[Entry]:
        resolved = self._resolve(node)
        yield from self._entries(resolved, path, file)
        for name, child in resolved["properties"].items():
            if "$ref" in child:
                yield from self._entries_below(f"{path}.{name}", child, file)

    def _table(self, node: Schema, path: str, file: str | None) -> str:
        rows = [
            (f"`{one.key.rpartition('.')[2]}`", one.kind, one.default, one.sentence)
            for one in self._entries(node, path, file)
        ]
        return table(("key", "type and range", "default", "what it does"), rows)

    def _entries(self, node: Schema, path: str, file: str | None) -> list[Entry]:
        """Return the keys of a section, without those of its subsections."""
        defaults = composed((f"{ALGORITHM}={file}",) if path.split(".")[0] == ALGORITHM else ())
        # Keys have the order of configs/, where neighbours belong together.
        names = [name for name, child in node["properties"].items() if "$ref" not in child and "oneOf" not in child]
        order = [key.rpartition(".")[2] for key in defaults if key.rpartition(".")[0] == path]
        return [
            Entry(key, kind(node["properties"][name]), shown(defaults, key), prose(self._comment(key, file)))
            for name in sorted(names, key=lambda name: (name != "name", order.index(name)))
            for key in [f"{path}.{name}".lstrip(".")]
        ]

    def _comment(self, key: str, file: str | None) -> str:
        """Return the comment of a key in configs/.

        Raises:
            UndocumentedError: the key has none.
        """
        section, _, rest = key.partition(".")
        if not rest:
            places = [("train.yaml", key)]
        else:
            places = [
                (str(path.relative_to(self.folder)), rest)
                for group in groups()
                if SECTION_OF.get(group, group) == section
                for path in sorted((self.folder / group).rglob("*.yaml"), key=lambda path: self._rank(group, path))
                if file is None or path.stem in laid_over(self.folder / group, file)
            ]
            # A file's own comment comes before those of the files that it is laid over.
            places.sort(key=lambda place: file is not None and Path(place[0]).stem != file)
        for name, path in places:
            comment = read_comments(self.folder / name).keys.get(path)
            if comment:
                return comment
        raise UndocumentedError(f"{key}: no comment above it in {' or '.join(name for name, _ in places)}")

    def _rank(self, group: str, path: Path) -> tuple[bool, bool, str]:
        """Sort the files that others share first, then the group's default file."""
        return path.parent.name == group, path.stem != self._default_file(group), str(path)

    def _header(self, group: str, file: str) -> str:
        header = read_comments(self.folder / group / f"{file}.yaml").header
        if not header:
            raise UndocumentedError(f"configs/{group}/{file}.yaml: no comment at its top, with a blank line below it")
        return header

    def _default_file(self, group: str) -> str:
        """Return the name of a group's default file."""
        return default_files(self.folder)[group]

    def _groups(self) -> str:
        rows = []
        for group, files in groups().items():
            if group != RECIPES:
                chosen = self._default_file(group)
                others = ", ".join(f"`{file}`" for file in files if file != chosen) or "none"
                rows.append((f"`{group}`", f"`{SECTION_OF.get(group, group)}`", f"`{chosen}`", others))
        return "## Groups\n\n" + table(("group", "section it fills", "default file", "other files"), rows)

    def _files(self, group: str, names: Sequence[str] = ()) -> str:
        """Describe the group's files, or these of them: what each is for, and how it differs from the default file."""
        if len(groups()[group]) == 1:
            return ""
        usual, default = composed(()), self._default_file(group)
        rows = []
        for file in sorted(names or groups()[group], key=lambda name: (name != default, name)):
            values = composed((f"{group}={file}",))
            changed = [
                f"`{key}={raw(value)}`"
                for key, value in values.items()
                if value != usual.get(key, ...) and not (isinstance(value, dict) and value)
            ]
            rows.append((f"`{group}={file}`", prose(self._header(group, file)), "<br>".join(changed) or "the defaults"))
        return f"### Files of the group {group}\n\n" + table(("choice", "what it is for", "sets"), rows)

    def _recipes(self) -> str:
        rows = []
        for name in groups()[RECIPES]:
            what, mark, run = self._header(RECIPES, name).partition("Run: ")
            if not (what and mark):
                raise UndocumentedError(f"recipes/{name}.yaml: its comment must say what it is, then `Run: WHERE`")
            config = composed((f"{RECIPES}={name}",))
            place = f"{config['cluster.num_nodes']} x {config['cluster.gpus_per_node']}"
            rows.append((f"`{name}`", prose(what), f"`{config['policy.model_name']}`", place, prose(run.rstrip("."))))
        return RECIPES_TITLE + table(("recipe", "what", "model", "nodes x GPUs", "run"), rows)

    def _resolve(self, node: Schema) -> Schema:
        return self.schema["$defs"][node["$ref"].rpartition("/")[2]]


@cache
def default_files(folder: Path) -> Mapping[str, str]:
    """Return the default file of each group."""
    listed = yaml.safe_load((folder / "train.yaml").read_text())["defaults"]
    return {group: file for item in listed if isinstance(item, dict) for group, file in item.items()}


@cache
def laid_over(folder: Path, file: str) -> set[str]:
    """Return the file of a group and the files of the group that it is laid over."""
    path = folder / f"{file}.yaml"
    listed = (yaml.safe_load(path.read_text()) or {}).get("defaults", []) if path.exists() else []
    bases = [base for base in listed if isinstance(base, str) and (folder / f"{base}.yaml").exists()]
    return {file}.union(*(laid_over(folder, base) for base in bases))


@cache
def composed(choices: tuple[str, ...]) -> Mapping[str, Any]:
    """Return every key and its unresolved value with these files chosen."""
    return dict(_leaves(OmegaConf.to_container(compose_files(choices), resolve=False)))


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values, sections included."""
    for name, value in node.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")


INTRODUCTION = """# Configuration reference

<!-- Written by scripts/config_reference.py from configs/ and the schema in nemo_rl_lite/config/. Change those. -->

Every key, its type and range, its default and what it does. Hydra composes one file of each group; the command line
chooses files (`group=file`) and changes keys (`key.path=value`, with or without a `+` before it):

```bash
nrl-lite train algorithm=sft policy.megatron_cfg.optimizer.lr=1e-4
```

`nrl-lite keys WORD` searches these keys. `--cfg job` prints the configuration that a command line composes and runs
nothing. `hydra.run.dir=FOLDER` names the
run's folder. Unknown keys, values out of range and keys that contradict each other are reported at once, before
anything starts. Keys of the command line that have no effect in that run are noted. `${a.b}` stands for the value of
another key.

`-m algorithm.seed=1,2,3` is a sweep: a run for each value, one after the other, in numbered folders under
`hydra.sweep.dir`. All are checked before the first one starts. One that fails does not end the sweep: a table
in the end has the result of each, and the exit status is that of the first that failed. One that is interrupted
(130) or stopped with a checkpoint (75) ends it at once."""
RECIPES_TITLE = """## Recipes

Whole experiments, laid over everything by `recipes=NAME`; keys on the command line come last. "nodes x GPUs" with 0
GPUs is a run on CPUs.

"""
