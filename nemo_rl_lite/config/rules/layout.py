"""Ranks, parallel groups, and batches that fill them."""

from collections.abc import Iterator

from nemo_rl_lite.config.model_shape import NoModelError, read_model_shape
from nemo_rl_lite.config.rules.base import rule
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import data_parallel_size, policy_ranks, samples_per_step
from nemo_rl_lite.errors import Violation

_PARALLEL = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "cluster.cpu_ranks",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
)


@rule("cluster.num_nodes", "cluster.gpus_per_node")
def cpu_only(config: Config) -> Iterator[Violation]:
    if config.cluster.gpus_per_node > 0:
        key, given = "cluster.gpus_per_node", config.cluster.gpus_per_node
        yield Violation(key, given, "this version places workers on CPUs only", f"{key}=0")
    elif config.cluster.num_nodes > 1:
        yield Violation("cluster.num_nodes", config.cluster.num_nodes, "CPU runs use one node", "cluster.num_nodes=1")


@rule(*_PARALLEL)
def ranks_fill_parallel_groups(config: Config) -> Iterator[Violation]:
    parallel, ranks = config.policy.megatron_cfg, policy_ranks(config)
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if ranks % (tensor * pipeline):
        yield Violation(
            "policy.megatron_cfg.tensor_model_parallel_size",
            tensor,
            f"tensor ({tensor}) x pipeline ({pipeline}) parallel size must divide the {ranks} policy ranks",
            f"cluster.cpu_ranks={tensor * pipeline}, or smaller parallel sizes",
        )


@rule("algorithm.num_prompts_per_step", "algorithm.num_generations_per_prompt", "policy.train_global_batch_size")
def rollout_fills_optimizer_steps(config: Config) -> Iterator[Violation]:
    samples, batch = samples_per_step(config), config.policy.train_global_batch_size
    if samples % batch:
        sizes = f"{config.algorithm.num_prompts_per_step} prompts x {config.algorithm.num_generations_per_prompt}"
        yield Violation(
            "policy.train_global_batch_size",
            batch,
            f"must divide the rollout's {samples} samples ({sizes} generations)",
            f"policy.train_global_batch_size={samples}, or another divisor of {samples}",
        )


@rule(*_PARALLEL, "policy.train_global_batch_size", "policy.train_micro_batch_size")
def micro_batches_fill_global_batch(config: Config) -> Iterator[Violation]:
    ranks = data_parallel_size(config)
    if not ranks:
        return
    batch, micro = config.policy.train_global_batch_size, config.policy.train_micro_batch_size
    if batch % (micro * ranks):
        yield Violation(
            "policy.train_micro_batch_size",
            micro,
            f"micro-batch ({micro}) x data-parallel size ({ranks}) must divide train_global_batch_size ({batch})",
            f"policy.train_micro_batch_size={batch // ranks}" if batch % ranks == 0 else "change the batch sizes",
        )


@rule(*_PARALLEL, "algorithm.num_prompts_per_step", "algorithm.num_generations_per_prompt", "policy.logprob_batch_size")
def logprob_batches_fill_rollout(config: Config) -> Iterator[Violation]:
    ranks = data_parallel_size(config)
    if not ranks:
        return
    samples, micro = samples_per_step(config), config.policy.logprob_batch_size
    if samples % (micro * ranks):
        yield Violation(
            "policy.logprob_batch_size",
            micro,
            f"micro-batch ({micro}) x data-parallel size ({ranks}) must divide the rollout's {samples} samples",
            f"policy.logprob_batch_size={samples // ranks}" if samples % ranks == 0 else "change the batch sizes",
        )


@rule(
    *_PARALLEL,
    "policy.model_name",
    "policy.max_total_sequence_length",
    "generation.backend",
    "generation.vllm_cfg.tensor_parallel_size",
)
def model_fits_the_layout(config: Config) -> Iterator[Violation]:
    try:
        model = read_model_shape(config.policy.model_name)
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError) as error:
        fix = "give a Hugging Face model folder or a hub name (organisation/model)"
        yield Violation("policy.model_name", config.policy.model_name, str(error), fix)
        return
    if model is None:
        return
    prefix = "policy.megatron_cfg"
    tensor = config.policy.megatron_cfg.tensor_model_parallel_size
    for what, count in (
        ("attention heads", model.heads),
        ("key/value heads", model.kv_heads),
        ("tokens", model.vocabulary),
    ):
        if count % tensor:
            key = f"{prefix}.tensor_model_parallel_size"
            sizes = [
                size for size in range(1, count + 1) if _splits(model.heads, model.kv_heads, model.vocabulary, size)
            ]
            yield Violation(key, tensor, f"must divide the model's {count} {what}", f"one of {sizes}")
    pipeline = config.policy.megatron_cfg.pipeline_model_parallel_size
    if model.layers % pipeline:
        key = f"{prefix}.pipeline_model_parallel_size"
        yield Violation(key, pipeline, f"must divide the model's {model.layers} layers", f"{key}=1")
    length = config.policy.max_total_sequence_length
    if length > model.max_positions:
        key = "policy.max_total_sequence_length"
        yield Violation(key, length, f"the model has {model.max_positions} positions", f"{key}={model.max_positions}")
    if config.generation.backend == "vllm" and config.cluster.gpus_per_node == 0 and model.head_dim < 32:
        fix = "generation=transformers, or a model with a larger head_dim"
        yield Violation("policy.model_name", config.policy.model_name, "vLLM on a CPU needs head_dim >= 32", fix)


def _splits(heads: int, kv_heads: int, vocabulary: int, size: int) -> bool:
    return not (heads % size or kv_heads % size or vocabulary % size)
