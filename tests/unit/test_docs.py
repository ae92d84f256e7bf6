"""Commands compose, links resolve, and named keys, files and metrics exist in the documents."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nemo_rl_lite import cli
from nemo_rl_lite.config.keys import groups, is_open, known_keys, unknown_key
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rules.compose import compose_config
from nemo_rl_lite.run.command import split_arguments
from tests.unit.pages import DOCS, PAGES, ROOT, anchors, blocks, commands, inline_code, prose, tables

NAME = {"ids": lambda page: str(page.relative_to(ROOT))}
PACKAGE = ROOT / "nemo_rl_lite"
SECTIONS = [group for group in groups() if group not in ("offload", "recipes")]
KEY = re.compile(rf"\+?((?:{'|'.join(SECTIONS)})(?:\.\w+)+)(?<!\.py)(?<!\.json)(?:=.*)?")
METRIC = re.compile(r"(?:train|validation|timing|performance|refit|memory|offload)/[\w/]*\w")
# Examples leave these to the reader: files, a model, code.
READERS = {
    "algorithm.loss",
    "data.train_path",
    "data.validation_path",
    "policy.model_name",
    "reward.name",
    "environment.name",
    "environment.kwargs.tools",
    "agent.name",
    "teacher.model_name",
}
NEMO_RL = DOCS / "from_nemo_rl.md"
# Algorithms by whose name keys of NeMo-RL begin.
OWN_SECTIONS = ("sft", "dpo", "distillation")


def test_rendered_tables_are_up_to_date():
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "render.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        # The site has only the pages of docs/.
        assert not page.is_relative_to(DOCS) or file.resolve().is_relative_to(DOCS), target
        assert not anchor or anchor in anchors(file), target


def build_site(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site strictly from a copy in `folder`."""
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy the files that the site is built from."""
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "scripts").mkdir()
    for file in ("mkdocs.yml", "scripts/mathml.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def test_the_site_is_built_and_asks_no_other_server(sources):
    done = build_site(sources)
    assert done.returncode == 0, done.stdout + done.stderr
    site = sources / "outputs" / "site"
    loaded = (
        r'<(?:script|img|iframe)[^>]*\ssrc="?(https?:[^">]*)|<link[^>]*\shref="?(https?:[^">]*)|url\("?(https?:[^")]*)'
    )
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not re.findall(loaded, file.read_text()), file
    formulas = (site / "algorithms.html").read_text()
    assert formulas.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= 5
    assert "arithmatex" not in formulas


@pytest.mark.parametrize("link", ["missing.md", "index.md#missing", "../README.md"])
def test_a_link_out_of_the_site_is_an_error(sources, link):
    (sources / "docs" / "index.md").write_text(f"# Start\n\n[broken]({link})\n")
    assert build_site(sources).returncode != 0


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_commands_are_valid(page):
    """Training commands compose, except for the reader's own files and code; other commands exist."""
    for words in commands(page):
        match words:
            case ["python", "-m", "nemo_rl_lite.train", *arguments] | ["nrl-lite", "train", *arguments]:
                check_training_command(arguments)
            case ["python", "-m", module, *_] if module.startswith("nemo_rl_lite."):
                assert importlib.util.find_spec(module), module
            case ["nrl-lite", verb, *_]:
                assert verb in cli.VERBS, verb
            case ["python" | "bash", script, *_] if script.startswith("scripts/"):
                assert (ROOT / script).exists(), script


def check_training_command(arguments: list[str]) -> None:
    flags, overrides = split_arguments(arguments)
    assert not list(flags.problems()), flags
    if flags.only_informs:
        return
    if flags.sweeps:
        overrides = [override.split(",")[0] for override in overrides]
    try:
        compose_config(overrides)
    except ConfigError as error:
        assert {violation.key for violation in error.violations} <= READERS, str(error)
        # A file that is named may be missing here, and one that is not named is missing for the reader.
        assert not any("is null" in violation.rule for violation in error.violations), str(error)


def test_commands_are_found():
    found = commands(DOCS / "quickstart.md")
    assert len([words for words in found if "nemo_rl_lite.train" in words]) >= 8
    assert ["nrl-lite", "export", "outputs/my-run", "./my-model"] in found


@pytest.fixture(scope="module")
def all_keys() -> set[str]:
    """Return the keys of every algorithm."""
    return set(known_keys())


@pytest.mark.parametrize("page", [page for page in PAGES if page != NEMO_RL], **NAME)
def test_keys_and_files_in_sentences_are_there(page, all_keys):
    for code in inline_code(prose(page)):
        word = code.rstrip(",;")
        group, _, file = word.partition("=")
        if group in groups() and file and not file.isupper() and "FILE" not in file:
            assert file in groups()[group], word
        if found := KEY.fullmatch(word):
            module = (PACKAGE / found[1].replace(".", "/")).with_suffix(".py")
            assert found[1] in all_keys or is_open(found[1]) or module.exists(), word


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_metrics_in_sentences_are_logged(page):
    source = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    for word in inline_code(prose(page)):
        if METRIC.fullmatch(word):
            name = re.sub(r"_(s|min|max|mean|bytes|gb_per_s)$", "", word.rpartition("/")[2])
            assert name in source, word


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_code_blocks_can_be_read(page):
    for text in blocks(page, "yaml"):
        yaml.safe_load(text)
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


def test_what_nemo_rl_has_is_here_as_its_table_says(all_keys):
    """Each key and default of the table exists, and its last column follows from them."""
    checked = 0
    for head, _, *rows in tables(NEMO_RL):
        if head != ["NeMo-RL", "here", "default there", "default here", "what changes"]:
            continue
        for theirs, here, their_default, default, what in rows:
            if here == "–":
                assert what.startswith("not there"), theirs
                continue
            same = here == "same key"
            keys = inline_code(theirs if same else here)
            assert keys and set(keys) <= all_keys, theirs
            other = bool(their_default and default) and number(their_default) != number(default)
            expected = ", ".join(["renamed"] * (not same) + ["other default"] * other) or "nothing"
            assert what.partition(";")[0] == expected, theirs
            if default:
                checked += 1
                assert default == documented_default(keys[0], theirs[1:].split(".")[0]), theirs
    assert checked > 80


def test_a_key_of_nemo_rl_is_answered_as_its_table_says():
    checked = 0
    for head, _, *rows in tables(NEMO_RL):
        if head != ["NeMo-RL", "here", "default there", "default here", "what changes"]:
            continue
        for theirs, here, *_ in rows:
            for key in re.findall(r"`([a-z_0-9]+\.[\w.]+)`", theirs) if here != "same key" else ():
                own = key.split(".")[0]
                algorithm = own if own in OWN_SECTIONS else "grpo"
                if key in known_keys(algorithm):
                    continue
                fix, checked = unknown_key(key, "1", algorithm).fix, checked + 1
                guess = re.search("did you mean (.*)\\?", fix)
                assert guess is None or guess[1] in inline_code(here), (key, fix)
                assert here == "–" or any(name in fix for name in inline_code(here)), (key, fix)
    assert checked > 80


def number(text: str) -> float | str:
    """Return a number by its value, whatever its spelling."""
    try:
        return float(text)
    except ValueError:
        return text


def documented_default(key: str, algorithm: str) -> str:
    """Return a key's default in docs/configuration.md, for one of `OWN_SECTIONS`, or else for GRPO."""
    section, _, name = key.rpartition(".")
    if section == "algorithm":
        section = f"algorithm={algorithm if algorithm in OWN_SECTIONS else 'grpo'}"
    page = (DOCS / "configuration.md").read_text()
    # Several algorithms have a section of the same name below them.
    parts = re.findall(rf"^#+ {re.escape(section)}\n(.*?)(?=^#|\Z)", page, re.M | re.S)
    rows = [row for part in parts if (row := re.search(rf"^\| `{name}` \|[^|]*\| (.*?) \|", part, re.M))]
    assert rows, key
    row = rows[0]
    return re.sub(r"^`([^`]*)`.*", r"\1", row[1])


def test_the_readme_begins_with_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line.split("#")[0].strip() for line in lines[2:4]] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]
