"""The parts of a Markdown page that tests look at."""

import re
import shlex
from pathlib import Path

from markdown.extensions.toc import slugify

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ANALYSES = sorted((DOCS / "analysis").glob("*.md"))
# Pages of records are made, and not in the repository.
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *ANALYSES),
    DOCS / "benchmarks" / "README.md",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def prose(page: Path) -> str:
    """Everything but fenced and indented code."""
    text = FENCE.sub("", page.read_text())
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def commands(page: Path) -> list[list[str]]:
    """The command lines that a reader is to type: of bash blocks and of indented ones, as words."""
    indented = [line[4:] for line in FENCE.sub("", page.read_text()).splitlines() if line.startswith("    ")]
    script = "\n".join([*blocks(page, "bash"), *indented]).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in script.splitlines()]
    return [[word for word in words if word != "..."] for words in lines if words]


def anchors(page: Path) -> set[str]:
    """What a link into a page may name, as GitHub and the site do."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


def inline_code(text: str) -> list[str]:
    """The words of code within sentences and tables."""
    return [word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()]
