"""Rules about batches: micro-batches that hold their sequences, and what they fill."""

from collections.abc import Iterator

from nemo_rl_lite.config.automatic import mb_tokens
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import (
    batch_mode,
    micro_batch_sizes,
    on_gpus,
    parallel_dims,
    row_round,
    samples_per_step,
    sequences_together,
)
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.layout import BATCHING, CLUSTER, MEGATRON, PARALLEL


@rule(
    *CLUSTER,
    *BATCHING,
    f"{MEGATRON}.context_parallel_size",
    "policy.max_total_sequence_length",
    "policy.sequence_length_round",
    f"{MEGATRON}.sequence_parallel",
    f"{MEGATRON}.tensor_model_parallel_size",
)
def token_batches_hold_a_sequence(config: Config) -> Iterator[Violation]:
    policy, gpu = config.policy, on_gpus(config)
    if policy.sequence_packing.enabled is True and policy.dynamic_batching.enabled:
        key = "policy.dynamic_batching.enabled"
        yield Violation(key, True, "packing and padding exclude each other", f"{key}=false")
        return
    if policy.sequence_packing.enabled is True and gpu and policy.precision != "bfloat16":
        key, rule_text = "policy.sequence_packing.enabled", "packed attention on a GPU needs bfloat16"
        yield Violation(key, True, rule_text, f"policy.precision=bfloat16, or {key}=false")
    mode = batch_mode(policy, gpu)
    if mode == "fixed":
        return
    name = "sequence_packing" if mode == "packed" else "dynamic_batching"
    limits = {"train_mb_tokens": mb_tokens(policy, mode, True), "logprob_mb_tokens": mb_tokens(policy, mode, False)}
    for key, tokens in limits.items():
        together = sequences_together(config) if key == "train_mb_tokens" else 1
        longest = together * policy.max_total_sequence_length
        if tokens < longest:
            held = "one sequence" if together == 1 else "a pair of sequences"
            rule_text = f"must hold {held} of policy.max_total_sequence_length = {longest // together} tokens"
            yield Violation(f"policy.{name}.{key}", tokens, rule_text, f"policy.{name}.{key}={longest}")
    if row_round(policy) > min(limits.values()):
        key, most = "policy.sequence_length_round", min(limits.values())
        yield Violation(key, policy.sequence_length_round, f"rounds up to more than {most} tokens", f"{key}=64")
    tensor = policy.megatron_cfg.tensor_model_parallel_size
    if policy.megatron_cfg.sequence_parallel and policy.sequence_length_round % tensor:
        key = "policy.sequence_length_round"
        rule_text = f"sequence parallelism splits the length over {tensor} ranks"
        yield Violation(key, policy.sequence_length_round, rule_text, f"{key}={tensor * 64}")


@rule(
    "algorithm.num_prompts_per_step",
    "algorithm.num_generations_per_prompt",
    "policy.train_global_batch_size",
    options=RolloutAlgorithmConfig,
)
def rollout_fills_optimizer_steps(config: Config) -> Iterator[Violation]:
    samples, batch = samples_per_step(config), config.policy.train_global_batch_size
    if samples % batch:
        options = config.options(RolloutAlgorithmConfig)
        sizes = f"{options.num_prompts_per_step} prompts x {options.num_generations_per_prompt}"
        divisors = [size for size in range(1, samples + 1) if samples % size == 0]
        near = min(divisors, key=lambda size: abs(size - batch))
        yield Violation(
            "policy.train_global_batch_size",
            batch,
            f"must divide the rollout's {samples} samples ({sizes} generations)",
            f"policy.train_global_batch_size={near}, or another divisor of {samples}",
        )


@rule(*PARALLEL, "policy.train_global_batch_size")
def ranks_share_the_global_batch(config: Config) -> Iterator[Violation]:
    ranks, batch = parallel_dims(config).dp, config.policy.train_global_batch_size
    if ranks and batch % ranks:
        key, fix = "policy.train_global_batch_size", f"a multiple of {ranks}, or another number of ranks"
        yield Violation(key, batch, f"must be a multiple of the data-parallel size ({ranks})", fix)


@rule(
    *PARALLEL,
    *BATCHING,
    "algorithm.num_prompts_per_step",
    "algorithm.num_generations_per_prompt",
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    options=RolloutAlgorithmConfig,
)
def logprob_batches_fill_rollout(config: Config) -> Iterator[Violation]:
    ranks = parallel_dims(config).dp
    if not ranks or batch_mode(config.policy, on_gpus(config)) != "fixed":
        return
    samples, micro = samples_per_step(config), micro_batch_sizes(config)[1]
    if samples % config.policy.train_global_batch_size:
        return
    if samples % ranks == 0 and micro < samples // ranks and samples // ranks % micro:
        yield Violation(
            "policy.logprob_batch_size",
            config.policy.logprob_batch_size,
            f"micro-batch ({micro}) x data-parallel size ({ranks}) must divide the rollout's {samples} samples",
            f"policy.logprob_batch_size={samples // ranks}",
        )
