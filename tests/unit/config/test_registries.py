"""The registries of algorithms and engines: every row leads to code, and nothing asks for a name outside of them."""

import ast
import typing
from inspect import signature

import pytest

from nemo_rl_lite.config.algorithms import ALGORITHMS, compares, generates, has_teacher
from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.config.keys import groups
from nemo_rl_lite.config.schema import Config, GenerationConfig
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.formats import RowFormat
from nemo_rl_lite.observability.summary import Panel
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.pages import ROOT

PACKAGE = ROOT / "nemo_rl_lite"
REGISTRIES = {PACKAGE / "config" / name for name in ("algorithms.py", "engines.py")}


def composed(file: str) -> Config:
    """The configuration with this algorithm and what a command must add."""
    has_teacher = file in ALGORITHMS and ALGORITHMS[file].has_teacher
    teacher = ["teacher.model_name=embedded:reverse-digits"] if has_teacher else []
    return compose_config([f"algorithm={file}", *teacher])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_row_leads_to_its_code(name):
    row, config = ALGORITHMS[name], composed(name)
    assert isinstance(config.algorithm, row.options)
    assert isinstance(imported(row.data), RowFormat)
    assert list(signature(imported(row.job)).parameters) == ["config", "folder", "console", "model_path"]
    loss = imported(row.loss)(config.algorithm)
    assert all(callable(getattr(loss, method)) for method in ("counts", "__call__"))
    assert all(isinstance(panel, Panel) for panel in imported(row.view))


def test_rows_are_those_of_the_configuration():
    union = typing.get_args(Config.__annotations__["algorithm"])[0]
    assert set(typing.get_args(union)) == {row.options for row in ALGORITHMS.values()}
    names = {file: composed(file).algorithm.name for file in groups()["algorithm"]}
    assert {name for file, name in names.items() if file == name} == ALGORITHMS.keys() == set(names.values())
    assert set(typing.get_args(GenerationConfig.__annotations__["backend"])) == ENGINES.keys()


def test_what_follows_from_a_row():
    assert [generates(compose_config([f"algorithm={name}"])) for name in ("grpo", "sft", "dpo")] == [True, False, False]
    kl = "algorithm.loss_fn.reference_policy_kl_penalty"
    taught = {name: has_teacher(composed(name)) for name in ALGORITHMS}
    assert taught == {name: name == "distillation" for name in ALGORITHMS}
    asked = [["algorithm=sft"], ["algorithm=dpo"], [f"{kl}=0.0"], [f"{kl}=0.1"]]
    assert [compares(compose_config(one)) for one in asked] == [False, True, False, True]


def test_nothing_compares_a_name_outside_the_registries():
    """An algorithm or an engine may be named in a message, not in a comparison. The doctor compares names of packages,
    which may be those of engines."""
    names = {*ALGORITHMS, *ENGINES}
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in PACKAGE.rglob("*.py")
        if file not in REGISTRIES and file.parent.name != "diagnosis"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Constant) and part.value in names for part in [node.left, *node.comparators])
    ]
    assert found == []
