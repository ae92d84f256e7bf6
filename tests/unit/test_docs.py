"""Commands compose, links resolve, and named keys, files and metrics exist in the documents."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from nemo_rl_lite import cli
from nemo_rl_lite.config.experiments import as_words, names_file
from nemo_rl_lite.config.keys import groups, is_open, known_keys
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.run.command import split_arguments
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.pages import DOCS, PAGES, ROOT, anchors, blocks, commands, inline_code, prose

NAME = {"ids": lambda page: str(page.relative_to(ROOT))}
PACKAGE = ROOT / "nemo_rl_lite"
SECTIONS = [group for group in groups() if group not in ("offload", "recipes")]
KEY = re.compile(rf"\+?((?:{'|'.join(SECTIONS)})(?:\.\w+)+)(?<!\.py)(?<!\.json)(?:=.*)?")
METRIC = re.compile(r"(?:train|validation|timing|performance|refit|memory|offload)/[\w/]*\w")
# Examples leave these to the reader: files, a model, code, a token of the hub.
READERS = {
    "algorithm.loss",
    "generation.draft_model",
    "data.map",
    "data.train_path",
    "data.validation_path",
    "policy.model_name",
    "reward.name",
    "environment.name",
    "environment.kwargs.tools",
    "agent.name",
    "teacher.model_name",
    "checkpoint.push_to_hub",
}


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


def test_the_site_is_built_and_asks_no_other_server(tmp_path):
    """As in a fresh clone, with the pages of records that are made for it."""
    (tmp_path / "scripts").mkdir()
    for file in ("mkdocs.yml", "scripts/mathml.py", "scripts/bench"):
        copy = shutil.copytree if (ROOT / file).is_dir() else shutil.copy
        copy(ROOT / file, tmp_path / file)
    shutil.copytree(DOCS, tmp_path / "docs")
    for command in (["scripts/bench/render.py", "--site"], ["-m", "zensical", "build", "--strict"]):
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "outputs" / "site"
    loaded = (
        r'<(?:script|img|iframe)[^>]*\ssrc="?(https?:[^">]*)|<link[^>]*\shref="?(https?:[^">]*)|url\("?(https?:[^")]*)'
    )
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not re.findall(loaded, file.read_text()), file
    formulas = (site / "preference.html").read_text()
    assert formulas.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') == 3
    assert "arithmatex" not in formulas
    assert (site / "benchmarks" / "quickstart-cpu-2cores.html").exists()
    assert "offload-presets-1x-h100" not in (site / "search.json").read_text()


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_commands_are_valid(page):
    """Training commands compose, except for the reader's own files and code; other commands exist."""
    for words in commands(page):
        match words:
            case ["nrl-lite", "train", *arguments]:
                check_training_command(arguments)
            case ["python", "-m", module, *_] if module.startswith("nemo_rl_lite."):
                assert importlib.util.find_spec(module), module
            case ["nrl-lite", verb, *_]:
                assert verb in cli.VERBS, verb
            case ["python" | "bash", script, *_] if script.startswith("scripts/"):
                assert (ROOT / script).exists(), script


def check_training_command(arguments: list[str]) -> None:
    # The reader's own experiment files and runs.
    own = [word for word in as_words(arguments) if not (names_file(word) or word.startswith("like="))]
    flags, overrides = split_arguments(own)
    assert not list(flags.problems()), flags
    if flags.only_informs:
        return
    if flags.sweeps:
        # Of each sweep, the first run.
        overrides = [one.split(",")[0] for one in overrides if not one.startswith("hydra.sweep.dir=")]
    try:
        compose_config(overrides)
    except ConfigError as error:
        assert {violation.key for violation in error.violations} <= READERS, str(error)
        # A file that is named may be missing here, and one that is not named is missing for the reader.
        assert not any("is null" in violation.rule for violation in error.violations), str(error)


@pytest.fixture(scope="module")
def all_keys() -> set[str]:
    """Return the keys of every algorithm."""
    return set(known_keys())


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_keys_and_files_in_sentences_are_there(page, all_keys):
    text = prose(page)
    if page.name.startswith("from_"):
        # Keys of another launcher, except in the second column of tables.
        text = "\n".join(re.findall(r"^\|[^|]*\|([^|]*)\|", text, re.M))
    for code in inline_code(text):
        word = code.rstrip(",;")
        group, _, file = word.partition("=")
        own = names_file(file) or "/" in file
        if group in groups() and file and not own and not file.isupper() and "FILE" not in file:
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


PLANS = [(page, text) for page in PAGES for text in blocks(page, "text") if text.startswith("$ nrl-lite plan ")]


@pytest.mark.parametrize(("page", "text"), PLANS, ids=[text.partition("\n")[0] for _, text in PLANS])
def test_printed_plans_are_those_of_today(page, text):
    """Each line of the block is in the command's output, in this order; `...` stands for lines left out."""
    command, *lines = text.splitlines()
    arguments = shlex.split(command)[3:]
    printed = subprocess.run(
        [sys.executable, "-m", "nemo_rl_lite.plan", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rest = iter(printed.stdout.splitlines())
    assert [line for line in lines if line != "..." and line not in rest] == []
