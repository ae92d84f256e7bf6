"""Policy ranks can leave a lost one, and torch's watchdog does not end them before."""

import pytest

from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import NCCL_ENVIRONMENT, _can_close, policy_environment

GPU = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=8"]
MEGATRON = "policy.megatron_cfg"
EXPERTS = [*GPU, "policy.model_name=Qwen/Qwen3-30B-A3B", f"{MEGATRON}.expert_model_parallel_size=8"]
FLEX = [*EXPERTS, f"{MEGATRON}.moe_token_dispatcher_type=flex", f"{MEGATRON}.moe_router_dtype=fp32"]


@pytest.mark.parametrize(("overrides", "expected"), [([], True), (EXPERTS, True), (FLEX, False)])
def test_ranks_with_kernels_that_no_abort_ends_get_new_processes(overrides, expected):
    assert _can_close(compose_config(overrides)) == expected


@pytest.mark.parametrize("overrides", [[], GPU])
def test_the_watchdog_of_policy_ranks_only_records_errors(overrides):
    environment = policy_environment(compose_config(overrides))
    assert (NCCL_ENVIRONMENT.items() <= environment.items()) == bool(overrides)
