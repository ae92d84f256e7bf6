"""Numbers that follow from a configuration: ranks, replicas, samples."""

from nemo_rl_lite.config.schema import Config


def policy_ranks(config: Config) -> int:
    """Policy workers: one a GPU, or `cluster.cpu_ranks`."""
    return config.cluster.num_nodes * config.cluster.gpus_per_node or config.cluster.cpu_ranks


def data_parallel_size(config: Config) -> int:
    """Policy replicas: ranks over tensor x pipeline parallel size."""
    parallel = config.policy.megatron_cfg
    return policy_ranks(config) // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)


def samples_per_step(config: Config) -> int:
    """Sequences a rollout."""
    return config.algorithm.num_prompts_per_step * config.algorithm.num_generations_per_prompt
