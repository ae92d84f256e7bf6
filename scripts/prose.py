"""Count what makes the project's English hard to read, and fail where a count has risen.

prose.py               compares the counts with those stored in tests/prose.json; exits with 1 where one has risen
prose.py FILE ...      prints each finding in these files
prose.py --store       stores the counts

The script reads Markdown pages, comments of YAML files, and docstrings, comments and messages of Python files.
Patterns are in prose.tsv: regular expression (case ignored), replacement, reason. The other rules are in `STRUCTURE`.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests" / "prose.json"
# Generated from YAML comments and records.
GENERATED = {"docs/configuration.md"}
# Mappings of keys, and the list of metrics.
TABULAR = {"docs/from_nemo_rl.md", "docs/from_trl.md", "docs/from_verl.md", "docs/metrics.md"}
MOST_WORDS = 25
MOST_TABLES = 4
STRUCTURE = {
    "opening": "a docstring opens with a verb or the noun that it defines",
    "sentence": f"a sentence has at most {MOST_WORDS} words",
    "cell": f"a table's cell has at most {MOST_WORDS} words",
    "tables": f"a guide page has at most {MOST_TABLES} tables",
    "words": "a standard term of the field exists",
}
OPENING = re.compile(r"(?:What|Whatever|Whether|How|Where|Who|Whose|Whom|Which|When|Why|That|If|As|Of|By|With|For)\b")
CODE = re.compile(r"`[^`]*`|\$\$?[^$]*\$\$?")
LINK = re.compile(r"\]\([^)]*\)")


@dataclass(frozen=True)
class Passage:
    """A paragraph, cell, comment or docstring, in one line of text."""

    line: int
    text: str
    kind: str


@dataclass(frozen=True)
class Finding:
    line: int
    rule: str
    text: str


def _words() -> list[tuple[re.Pattern, str]]:
    rows = [row.split("\t") for row in Path(__file__).with_suffix(".tsv").read_text().splitlines() if row]
    return [(re.compile(pattern, re.I), instead) for pattern, instead, _ in rows]


WORDS = _words()


def findings(file: Path) -> Iterator[Finding]:
    """Yield each finding in one file."""
    tables = 0
    for passage in READERS[file.suffix](file.read_text()):
        tables += passage.kind == "table"
        if passage.kind == "docstring" and OPENING.match(passage.text):
            yield Finding(passage.line, "opening", passage.text[:60])
        rule = "cell" if passage.kind == "cell" else "sentence"
        for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", passage.text):
            if passage.kind != "message" and len(sentence.split()) > MOST_WORDS:
                yield Finding(passage.line, rule, f"{len(sentence.split())} words: {sentence[:60]}")
        for pattern, instead in WORDS:
            for found in pattern.finditer(passage.text):
                yield Finding(passage.line, "words", f"'{found[0]}' -> {instead}")
    is_mapping = str(file).endswith(tuple(TABULAR))
    for _ in range(0 if is_mapping else tables - MOST_TABLES):
        yield Finding(1, "tables", f"{tables} tables")


def _markdown(text: str) -> Iterator[Passage]:
    text = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), text, flags=re.M | re.S)
    text = LINK.sub("]", CODE.sub("`c`", re.sub(r"<!--.*?-->", "", text, flags=re.S)))
    line = 1
    for paragraph in re.split(r"(\n(?:\s*\n)+|\n(?=\s*(?:[-*|#]|\d+\.) ?))", text):
        words = paragraph.strip()
        if words.startswith("|"):
            if re.fullmatch(r"\|[-: |]+\|", words):
                yield Passage(line, "", "table")
            for cell in words.strip("|").split(" | "):
                yield Passage(line, cell, "cell")
        elif words and not paragraph.startswith("    "):
            yield Passage(line, re.sub(r"\s+", " ", words), "paragraph")
        line += paragraph.count("\n")


def _yaml(text: str) -> Iterator[Passage]:
    for found in re.finditer(r"(?:^[ ]*# (?!@).*\n?)+", text, re.M):
        words = re.sub(r"\s*\n?\s*# ", " ", "\n" + found[0]).strip()
        yield Passage(text.count("\n", 0, found.start()) + 1, words, "comment")


def _python(text: str) -> Iterator[Passage]:
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        # A field's docstring follows the field.
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(words))):
                    docstrings.add(statement.value)
                    yield Passage(statement.lineno, "\n\n".join(_paragraphs(words)), "docstring")
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if is_text and node not in docstrings:
            yield Passage(node.lineno, node.value, "message")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(token.start[0], token.string.lstrip("# "), "comment")


def _paragraphs(docstring: str) -> list[str]:
    """Split a docstring where a sentence cannot reach over: blank lines, list items and sections."""
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:- |\w+:))", docstring.strip())
    return [re.sub(r"\s+", " ", CODE.sub("`c`", part)) for part in parts]


READERS = {".md": _markdown, ".yaml": _yaml, ".py": _python}


def tracked() -> list[Path]:
    """Return the files of the repository that are checked."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    kept = [name for name in names if Path(name).suffix in READERS and name not in GENERATED]
    return [ROOT / name for name in kept if not name.startswith(("tests/", ".")) and (ROOT / name).exists()]


def counts() -> dict[str, int]:
    """Return the number of findings of each rule in the repository."""
    found = Counter(finding.rule for file in tracked() for finding in findings(file))
    return {rule: found[rule] for rule in STRUCTURE}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--store", action="store_true", help="store the counts of today")
    given = parser.parse_args()
    if given.files:
        for file in given.files:
            for finding in findings(file):
                print(f"{file}:{finding.line}: {finding.rule}: {finding.text}")
        return 0
    now = counts()
    if given.store:
        STORED.write_text(json.dumps(now, indent=2) + "\n")
    stored = json.loads(STORED.read_text())
    for rule, count in now.items():
        print(f"{count:6} (stored {stored[rule]}) {rule}: {STRUCTURE[rule]}")
    return int(any(now[rule] > stored[rule] for rule in now))


if __name__ == "__main__":
    sys.exit(main())
