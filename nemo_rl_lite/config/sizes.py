"""Numbers that follow from a configuration: ranks, engines, replicas, samples."""

from math import lcm
from typing import Literal

from nemo_rl_lite.config.algorithms import algorithm_of, generates
from nemo_rl_lite.config.parallel import ParallelDims
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig, RolloutAlgorithmConfig
from nemo_rl_lite.config.sections.policy import PolicyConfig

BatchMode = Literal["fixed", "dynamic", "packed"]
# The policy computes the logits of this many entries of the vocabulary at a time.
VOCABULARY_SLICE = 8192


def on_gpus(config: Config) -> bool:
    return config.cluster.gpus_per_node > 0


def records_training(config: Config) -> bool:
    """Whether training passes are recorded as CUDA graphs."""
    return on_gpus(config) and config.policy.megatron_cfg.cuda_graph_impl != "none"


def validates(config: Config) -> bool:
    """Return whether the run validates at all."""
    options = config.algorithm
    last = options.max_num_steps
    periodic = options.val_period > 0 and (last is None or options.val_period <= last)
    return options.val_at_start or options.val_at_end or periodic


def has_endpoint(config: Config) -> bool:
    """Whether the engines also answer over HTTP."""
    return config.generation.serve.enabled or config.agent.name is not None


def all_gpus(config: Config) -> int:
    return config.cluster.num_nodes * config.cluster.gpus_per_node


def generation_gpus(config: Config) -> int:
    """GPUs that engines run on: all GPUs if colocated, otherwise those set apart. 0 on CPUs."""
    if not on_gpus(config) or config.generation.colocated.enabled:
        return all_gpus(config)
    resources = config.generation.colocated.resources
    if resources.num_nodes is not None:
        return resources.num_nodes * config.cluster.gpus_per_node
    return resources.gpus_per_node or 0


def policy_ranks(config: Config) -> int:
    """Policy workers: one for each GPU that is not set apart for generation, or `cluster.cpu_ranks`."""
    if not on_gpus(config):
        return config.cluster.cpu_ranks
    shared = config.generation.colocated.enabled or not generates(config)
    return all_gpus(config) - (0 if shared else generation_gpus(config))


def engines(config: Config) -> int:
    """Generation engines: as many as there are GPUs for, or `generation.data_parallel_size` on CPUs."""
    if not on_gpus(config):
        return config.generation.data_parallel_size or 1
    return generation_gpus(config) // config.generation.vllm_cfg.tensor_parallel_size


def engine_ranks(config: Config) -> int:
    """Processes, and on GPUs devices, of one engine."""
    return config.generation.vllm_cfg.tensor_parallel_size if on_gpus(config) else 1


def parallel_dims(config: Config) -> ParallelDims:
    """How the policy's ranks are split."""
    return ParallelDims.of(config.policy.megatron_cfg, policy_ranks(config))


def batch_mode(policy: PolicyConfig, on_gpu: bool) -> BatchMode:
    """How sequences become micro-batches. `auto` packs where Transformer Engine can: on GPUs in bfloat16."""
    packs = policy.sequence_packing.enabled
    if packs == "auto":
        packs = on_gpu and policy.precision == "bfloat16" and not policy.dynamic_batching.enabled
    return "packed" if packs else "dynamic" if policy.dynamic_batching.enabled else "fixed"


def row_round(policy: PolicyConfig) -> int:
    """Packed and dynamic rows are rounded up to a multiple of this many tokens. Context-parallel ranks share a row:
    each has a multiple of `sequence_length_round`, in two halves of equal length."""
    context, own = policy.megatron_cfg.context_parallel_size, policy.sequence_length_round
    return own if context == 1 else context * lcm(own, 2)


def sequences_together(config: Config) -> int:
    """Neighbouring sequences that the loss compares, such as a preference pair's two."""
    return algorithm_of(config).sequences_together


def sequences_per_optimizer_step(config: Config) -> int:
    return config.policy.train_global_batch_size * sequences_together(config)


def micro_batch_sizes(config: Config) -> tuple[int, int]:
    """Sequences (or pairs) of a micro-batch in training, and sequences of one for logprobs, where these are fixed.

    The key of training gives the most: a rank takes the largest number up to it that divides its share. Equal keys give
    equal sizes, so that the importance ratio of a fresh rollout is exactly 1."""
    policy, ranks = config.policy, max(1, parallel_dims(config).dp)
    share = max(1, policy.train_global_batch_size // ranks)
    most = min(policy.train_micro_batch_size, share)
    training = next(size for size in range(most, 0, -1) if share % size == 0)
    if policy.logprob_batch_size == policy.train_micro_batch_size:
        return training, training
    return training, policy.logprob_batch_size


def samples_per_step(config: Config) -> int:
    """Sequences of a rollout."""
    options = config.options(RolloutAlgorithmConfig)
    return options.num_prompts_per_step * options.num_generations_per_prompt


def optimizer_steps(config: Config) -> int:
    """Optimizer steps on a rollout."""
    return samples_per_step(config) // sequences_per_optimizer_step(config)


def repeats_first_pass(config: Config) -> bool:
    """Whether the first optimizer step's sequences get their previous logprobs from a pass of their own."""
    return config.options(GRPOConfig).loss_fn.force_on_policy_ratio is False


def previous_passes(config: Config) -> float:
    """The share of a rollout's sequences that get their previous logprobs from a pass of their own."""
    return 1.0 if repeats_first_pass(config) else 1 - 1 / optimizer_steps(config)
