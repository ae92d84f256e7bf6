"""Which tests run one after another in one process, and in what order, where several processes run them."""

from pathlib import Path

import pytest

# Modules of functional tests by group: those of a group share a process and what it has imported. Other modules are a
# group each. The longest come first, so that none of them is left to one process at the end.
GROUPS = {
    "test_quickstart": "quickstart",
    "test_recovery": "recovery",
    # Ranks are forked from one process.
    "test_parallel_parity": "ranks",
    "test_experts": "ranks",
    "test_checkpoints": "ranks",
    "test_four_ranks": "four ranks",
    "test_failures": "failures",
    "test_engines": "engines",
    "test_engine_ranks": "engines",
    # Policies in this process.
    "test_sft": "here",
    "test_dpo": "here",
    "test_lora": "here",
    "test_resume": "here",
}
# Single cases of a module that a group need not hold together, in so many groups.
PARTS = {"rules/test_bad_configs": 4}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {module: place for place, module in enumerate(GROUPS)}
    items.sort(key=lambda item: places.get(_module(item.path), len(places)))
    for index, item in enumerate(items):
        module = _module(item.path)
        part = f" {index % PARTS[module]}" if module in PARTS else ""
        item.add_marker(pytest.mark.xdist_group(GROUPS.get(module, str(item.path)) + part))


def _module(path: Path) -> str:
    """Its name; with its folder, where modules elsewhere have the same."""
    return path.stem if path.parent.name == "functional" else f"{path.parent.name}/{path.stem}"
