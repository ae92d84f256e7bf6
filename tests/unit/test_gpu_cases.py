"""The settings of the tests that need a GPU compose without one."""

import pytest

from nemo_rl_lite.rules.compose import compose_config
from tests.gpu import test_checkpoints, test_context, test_graphs, test_router_replay, test_run


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


@pytest.mark.parametrize("layout", test_router_replay.LAYOUTS)
def test_settings_of_router_replay_are_no_configuration_error(layout):
    gpus, own = test_router_replay.LAYOUTS[layout]
    named = [f"cluster.gpus_per_node={gpus}", "policy.model_name=Qwen/Qwen3-30B-A3B"]
    overrides = [*test_run.SMALL, *test_router_replay.OVERRIDES, *own, *named, "policy.router_replay.enabled=true"]
    assert compose_config(overrides).policy.router_replay.enabled
