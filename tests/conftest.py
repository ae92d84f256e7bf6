"""Which tests run one after another in one process, and in what order, where several processes run them.

pytest-xdist asks for its scheduler here, because its own groups (`--dist loadgroup`) rely on an attribute that test
items no longer have in pytest 9.2: it runs each test wherever there is room, and module fixtures twice.
"""

import gc
import zlib
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import pytest

from nemo_rl_lite.compat.imports import quick_imports
from nemo_rl_lite.system import stopping

# Functional modules by group: the tests of a group share a process and what it has imported. Every other module is a
# separate group. The longest groups come first, so that none is left to one process at the end.
GROUPS = {
    "test_bench": "bench",
    "test_rollout_workers": "rollout workers",
    "test_distillation": "distillation",
    "test_quickstart": "quickstart",
    "test_recovery": "recovery",
    "test_async": "async",
    "test_evaluate": "evaluate",
    "test_overlap": "overlap",
    # Ranks are forked from one process.
    "test_parallel_parity": "ranks",
    "test_experts": "ranks",
    "test_checkpoints": "ranks",
    "test_shares": "ranks",
    "test_adapters": "adapters",
    "test_router_replay": "routers",
    "test_four_ranks": "four ranks",
    "test_failures": "failures",
    "test_tool_runs": "failures",
    "test_engines": "engines",
    "test_quantized_engine": "engines",
    # Two Rays that start at the same time on two cores can miss each other's deadlines.
    "test_node": "nodes",
    "test_nodes": "nodes",
    # Policies run in this process.
    "test_sft": "here",
    "test_dpo": "here",
    "test_lora": "here",
    "test_judge": "here",
    "test_grpo": "here",
    "test_python_api": "here",
    "test_resume": "here",
    "test_serving": "here",
}
# Folders of unit tests that are one group. Most modules of losses import TRL, which takes as long as many tests.
TOGETHER = ("losses",)
# Modules whose tests are independent, and the number of groups that they are split into.
PARTS = {"test_bad_configs": 4}
_PLACES = {module: place for place, module in enumerate(GROUPS)}


@pytest.fixture(autouse=True)
def no_signal_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps in mind that it was asked to end."""
    for name, value in (("_received", []), ("_request", ""), ("_at_once", False), ("_waits_for_step", False)):
        monkeypatch.setattr(stopping, name, value)


def module_of(nodeid: str) -> tuple[str, str]:
    """The module of a test, and its path; the module is empty for a test that is not functional."""
    path = PurePath(nodeid.partition("::")[0])
    return path.stem if path.parent.name == "functional" else "", str(path)


def group_of(nodeid: str) -> str:
    """The group of a test."""
    module, path = module_of(nodeid)
    parts = PARTS.get(PurePath(path).stem, 1)
    if PurePath(path).parent.name in TOGETHER:
        return PurePath(path).parent.name
    return GROUPS.get(module, path) + (f" {zlib.crc32(nodeid.encode()) % parts}" if parts > 1 else "")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Every process imports all modules, and most of what they test, which later collections of garbage leave out."""
    with quick_imports():
        result = yield
    gc.freeze()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _PLACES.get(module_of(item.nodeid)[0], len(_PLACES)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler that hands out whole groups."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)
