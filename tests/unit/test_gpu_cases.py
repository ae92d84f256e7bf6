"""The settings of the tests that need a GPU compose without one."""

import inspect
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.validation.compose import compose_config
from tests.functional import lost_policy
from tests.gpu import (
    test_async,
    test_checkpoints,
    test_context,
    test_graphs,
    test_hosts,
    test_lora,
    test_lost_rank,
    test_low_precision,
    test_policy,
    test_router_replay,
    test_run,
)

# How many runs a test makes, where it compares some.
RUNS = {
    "test_fp8_is_near_bfloat16": 2,
    "test_frozen_weights_are_in_one_copy_and_training_is_the_same": 2,
    "test_adapters_of_a_captured_engine_are_those_of_an_eager_one": 2,
}
# A model of the same kind, whose shape is known, for each fixture of a model.
FIXTURES = {"gpu_model": "Qwen/Qwen3-8B", "gpu_experts_model": "Qwen/Qwen3-30B-A3B", "cluster": MagicMock()}


def whole_runs() -> Iterator[Any]:
    """The tests of whole runs with each of their parameters: the module, the test, and its arguments."""
    for module in (test_async, test_hosts, test_lora, test_low_precision, test_run):
        for name, function in vars(module).items():
            if name.startswith("test_") and inspect.isfunction(function):
                for given in parameters(function):
                    yield pytest.param(module, function, given, id=f"{name} {' '.join(map(str, given.values()))}")


def parameters(function: Any) -> list[dict[str, Any]]:
    """The arguments that a test is parametrized with, in all combinations."""
    lists = []
    for mark in function.pytestmark:
        if mark.name == "parametrize":
            names, values = mark.args
            names = [names] if isinstance(names, str) else names
            lists.append([dict(zip(names, one if len(names) > 1 else [one], strict=True)) for one in values])
    return [{name: value for one in both for name, value in one.items()} for both in itertools.product(*lists)]


@pytest.mark.parametrize(("module", "function", "given"), whole_runs())
def test_settings_of_a_whole_run_are_no_configuration_error(
    module: ModuleType, function: Any, given: dict[str, Any], monkeypatch, tmp_path
):
    composed, errors = [], []

    def compose(folder: Path, model: Path, *overrides: str, **_: Any) -> tuple[str, Any]:
        try:
            composed.append(compose_config([f"policy.model_name={model}", *overrides]))
        except ConfigError as error:
            errors.append(error)
        return "", MagicMock()

    # The runs of the tests start here, or in a function of test_run.py.
    monkeypatch.setattr(module, "train", compose, raising=False)
    monkeypatch.setattr(test_run, "train", compose)
    fixtures = {name: own for name, own in FIXTURES.items() if name in inspect.signature(function).parameters}
    # What a test then looks at in the metrics is not there.
    with suppress(Exception):
        function(**fixtures, tmp_path=tmp_path, **given)
    assert not errors and len(composed) == RUNS.get(function.__name__, 1)


@pytest.mark.parametrize("case", test_checkpoints.CASES)
def test_settings_of_a_gpu_test_are_no_configuration_error(case):
    overrides, _ = test_checkpoints.CASES[case]
    assert (
        compose_config(
            ["policy.max_total_sequence_length=128", *test_checkpoints.COMMON, *overrides]
        ).cluster.gpus_per_node
        == 1
    )


@pytest.mark.parametrize("graphs", ["none", "full_iteration"])
def test_settings_of_the_test_of_graphs_are_no_configuration_error(graphs):
    config = compose_config([*test_graphs.OVERRIDES, f"policy.megatron_cfg.cuda_graph_impl={graphs}"])
    assert config.policy.megatron_cfg.cuda_graph_impl == graphs


@pytest.mark.parametrize("layout", test_context.LAYOUTS)
def test_settings_of_shared_sequences_are_no_configuration_error(layout):
    ranks, overrides = test_context.LAYOUTS[layout]
    model = "Qwen/Qwen3-30B-A3B" if layout.startswith(test_context.EXPERTS) else "Qwen/Qwen3-8B"
    own = [f"cluster.gpus_per_node={ranks}", f"policy.model_name={model}", *overrides]
    sharing = compose_config([*test_context.COMMON, *own]).policy.megatron_cfg.context_parallel_size
    assert (sharing == 1) == (layout not in test_context.SHARED) and ranks % sharing == 0


@pytest.mark.parametrize("case", test_lost_rank.CASES)
def test_settings_of_a_lost_rank_are_no_configuration_error(case):
    overrides, victim, _ = test_lost_rank.CASES[case]
    base = ["policy.max_total_sequence_length=32", "policy.model_name=Qwen/Qwen3-8B", *lost_policy.SETTINGS]
    assert victim < compose_config([*base, *overrides]).cluster.gpus_per_node == 2
    run = [*test_lost_rank.RUN, "policy.model_name=Qwen/Qwen3-8B", test_lost_rank.TENSOR]
    assert compose_config(run).checkpoint.save_period == 1


@pytest.mark.parametrize("layout", test_policy.LAYOUTS)
def test_settings_of_a_policy_are_no_configuration_error(layout):
    ranks, own = test_policy.LAYOUTS[layout]
    base = [*test_policy.COMMON, "generation.max_new_tokens=8", "policy.model_name=Qwen/Qwen3-8B"]
    assert compose_config([*base, f"cluster.gpus_per_node={ranks}", *own]).cluster.gpus_per_node == ranks


@pytest.mark.parametrize("layout", test_router_replay.LAYOUTS)
def test_settings_of_router_replay_are_no_configuration_error(layout):
    gpus, own = test_router_replay.LAYOUTS[layout]
    named = [f"cluster.gpus_per_node={gpus}", "policy.model_name=Qwen/Qwen3-30B-A3B"]
    overrides = [*test_run.SMALL, *test_router_replay.OVERRIDES, *own, *named, "policy.router_replay.enabled=true"]
    assert compose_config(overrides).policy.router_replay.enabled


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        ([], ["tests/gpu"]),
        (["-k", "heads"], ["tests/gpu", "-k", "heads"]),
        (["tests/gpu/test_run.py::test_it", "-x"], ["tests/gpu/test_run.py::test_it", "-x"]),
    ],
)
def test_the_script_runs_all_tests_or_the_named_ones(arguments, run, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NRL_PYTHON": "echo"}
    command = ["bash", Path(__file__).parents[2] / "scripts" / "gpu_tests.sh", *arguments]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-m", "pytest", "-m", "gpu", "--timeout=580", *run]
