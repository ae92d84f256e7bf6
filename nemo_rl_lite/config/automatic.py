"""What `auto` stands for until it is settled: `planning.automatic.settle` replaces it by what fits the GPUs when a run
starts."""

from collections.abc import Sequence
from typing import Literal

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig
from nemo_rl_lite.config.sections.generation import GenerationConfig
from nemo_rl_lite.config.sections.policy import (
    DynamicBatchingConfig,
    OffloadedComponent,
    PolicyConfig,
    SequencePackingConfig,
)

# A micro-batch of this many tokens keeps a GPU busy. A small model, which waits for the launch of its kernels, gains
# from larger ones.
ENOUGH_TOKENS = 16384
# An engine's share of a GPU of its own, and of one that it shares with the policy.
SHARE_APART, SHARE_COLOCATED = 0.9, 0.5


def token_limits(
    policy: PolicyConfig, mode: Literal["packed", "dynamic"]
) -> SequencePackingConfig | DynamicBatchingConfig:
    """The section of the limits of packed or of dynamic batches."""
    return policy.sequence_packing if mode == "packed" else policy.dynamic_batching


def mb_tokens(policy: PolicyConfig, mode: Literal["packed", "dynamic"], training: bool) -> int:
    """Most tokens of a micro-batch of training, or of logprob inference."""
    limits = token_limits(policy, mode)
    limit = limits.train_mb_tokens if training else limits.logprob_mb_tokens
    return max(enough_tokens(policy), policy.max_total_sequence_length) if limit == "auto" else limit


def enough_tokens(policy: PolicyConfig) -> int:
    """Tokens of a micro-batch that keep the GPUs busy that share it."""
    return ENOUGH_TOKENS * policy.megatron_cfg.context_parallel_size


def keeps_logits(policy: PolicyConfig) -> bool:
    """Whether the backward pass finds the logits of the forward pass: not where that is not settled."""
    return policy.megatron_cfg.keep_logits is True


def leaving_for_generation(policy: PolicyConfig) -> Sequence[OffloadedComponent]:
    """The components that leave the GPU while engines generate: nothing where that is not settled."""
    return [] if policy.offload_for_generation == "auto" else policy.offload_for_generation


def engine_share(generation: GenerationConfig) -> float:
    """The share of a GPU's memory that an engine takes."""
    share = generation.vllm_cfg.gpu_memory_utilization
    unsettled = SHARE_COLOCATED if generation.colocated.enabled else SHARE_APART
    return unsettled if share == "auto" else share


def generates_ahead(config: Config) -> bool:
    """Whether engines generate while the policy trains."""
    return isinstance(config.algorithm, GRPOConfig) and config.algorithm.rollouts.source != "on_policy"


def sleep_is_wanted(config: Config) -> bool:
    """Whether engines on the policy's GPUs are to sleep while it works. Where that is not settled, those sleep that
    take turns with it."""
    sleep = config.generation.colocated.sleep
    return not generates_ahead(config) if sleep == "auto" else sleep
