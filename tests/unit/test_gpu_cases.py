"""The settings of the tests that need a GPU compose without one."""

import pytest

from nemo_rl_lite.rules.compose import compose_config
from tests.gpu import test_checkpoints


@pytest.mark.parametrize("case", test_checkpoints.CASES)
def test_settings_of_a_gpu_test_are_no_configuration_error(case):
    overrides, _ = test_checkpoints.CASES[case]
    assert (
        compose_config(
            ["policy.max_total_sequence_length=128", *test_checkpoints.COMMON, *overrides]
        ).cluster.gpus_per_node
        == 1
    )
