from nemo_rl_lite.policy.optimizer import megatron_options
from nemo_rl_lite.validation.compose import compose_config

GPU = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=transformers"]
ON_HOST = [*GPU, "policy.max_total_sequence_length=64", "generation.max_new_tokens=16", "offload=cpu_optimizer"]
OPTIMIZER = "policy.megatron_cfg.optimizer"


def test_only_the_cpu_optimizer_has_options():
    own = compose_config([*ON_HOST, f"{OPTIMIZER}.optimizer_offload_fraction=0.1"])
    assert megatron_options(own.policy.megatron_cfg.optimizer)["optimizer_offload_fraction"] == 0.1
    assert megatron_options(compose_config().policy.megatron_cfg.optimizer) == {}
