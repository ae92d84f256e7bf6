"""The settings of the tests that need a GPU compose without one."""

import pytest

from nemo_rl_lite.rules.compose import compose_config
from tests.gpu import test_checkpoints, test_graphs


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
