"""Rules about ranks, parallel groups, and batches that fill them."""

from collections.abc import Iterator

from nemo_rl_lite.config.automatic import mb_tokens
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import (
    all_gpus,
    batch_mode,
    generation_gpus,
    micro_batch_sizes,
    on_gpus,
    parallel_dims,
    row_round,
    samples_per_step,
    sequences_together,
)
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule

CLUSTER = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "cluster.cpu_ranks",
    "generation.colocated",
)
PARALLEL = (
    *CLUSTER,
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.context_parallel_size",
)
_BATCHING = ("policy.precision", "policy.sequence_packing", "policy.dynamic_batching")
MEGATRON = "policy.megatron_cfg"


@rule("cluster.num_nodes", "cluster.gpus_per_node", "cluster.cpu_ranks")
def cpu_ranks_fill_nodes(config: Config) -> Iterator[Violation]:
    nodes, ranks = config.cluster.num_nodes, config.cluster.cpu_ranks
    if not on_gpus(config) and ranks % nodes:
        fix = f"cluster.cpu_ranks={-(-ranks // nodes) * nodes}, or cluster.num_nodes=1"
        yield Violation("cluster.cpu_ranks", ranks, f"must be a multiple of the {nodes} nodes (cluster.num_nodes)", fix)


@rule(*CLUSTER, "policy.precision")
def gpus_compute_in_bfloat16(config: Config) -> Iterator[Violation]:
    if on_gpus(config) and config.policy.precision == "float32":
        fix = "policy=megatron_gpu generation=vllm_gpu, or policy.precision=bfloat16"
        yield Violation("policy.precision", "float32", "is for CPUs: GPU kernels round it or do not take it", fix)


@rule(*CLUSTER, options=RolloutAlgorithmConfig)
def generation_has_gpus(config: Config) -> Iterator[Violation]:
    if not on_gpus(config) or config.generation.colocated.enabled:
        return
    prefix, resources = "generation.colocated.resources", config.generation.colocated.resources
    gpus, total = generation_gpus(config), all_gpus(config)
    if resources.num_nodes is not None and resources.gpus_per_node not in (None, config.cluster.gpus_per_node):
        rule_text = "whole nodes are set apart, or GPUs of one node, not both"
        yield Violation(f"{prefix}.gpus_per_node", resources.gpus_per_node, rule_text, f"{prefix}.gpus_per_node=null")
    elif not 0 < gpus < total:
        name = "num_nodes" if resources.num_nodes is not None else "gpus_per_node"
        rule_text = f"sets {gpus} of the run's {total} GPUs apart for generation; at least one must, and one must stay"
        fix = f"{prefix}.gpus_per_node=1" if total > 1 else "generation.colocated.enabled=true"
        yield Violation(f"{prefix}.{name}", getattr(resources, name), rule_text, fix)


@rule(*PARALLEL, f"{MEGATRON}.expert_model_parallel_size")
def ranks_fill_parallel_groups(config: Config) -> Iterator[Violation]:
    dims = parallel_dims(config)
    # Without a rank, the rule above has spoken.
    if dims.world and not dims.fills_world:
        more = "more GPUs" if on_gpus(config) else f"cluster.cpu_ranks={dims.replica}"
        sizes = f"tensor ({dims.tp}) x pipeline ({dims.pp})" + (f" x context ({dims.cp})" if dims.cp > 1 else "")
        only_context = dims.cp > 1 and dims.tp * dims.pp == 1
        yield Violation(
            f"{MEGATRON}.{'context_parallel_size' if only_context else 'tensor_model_parallel_size'}",
            dims.cp if only_context else dims.tp,
            f"{sizes} parallel size must divide the {dims.world} policy ranks",
            f"{more}, or smaller parallel sizes",
        )
    elif dims.stage % dims.ep:
        key = f"{MEGATRON}.expert_model_parallel_size"
        yield Violation(key, dims.ep, f"must divide the {dims.stage} ranks of a pipeline stage", f"{key}=1")


@rule(
    *CLUSTER,
    f"{MEGATRON}.sequence_parallel",
    f"{MEGATRON}.tensor_model_parallel_size",
    f"{MEGATRON}.expert_model_parallel_size",
)
def gpu_only_layouts(config: Config) -> Iterator[Violation]:
    parallel = config.policy.megatron_cfg
    if parallel.sequence_parallel and not on_gpus(config):
        key = f"{MEGATRON}.sequence_parallel"
        yield Violation(key, True, "megatron-core's norms on a CPU do not split sequences", f"{key}=false")
    elif parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        key = f"{MEGATRON}.sequence_parallel"
        yield Violation(key, True, "splits over tensor-parallel ranks, and there is one", f"{key}=false")


@rule(*CLUSTER, *_BATCHING, f"{MEGATRON}.context_parallel_size")
def sequences_can_be_shared(config: Config) -> Iterator[Violation]:
    size, key = config.policy.megatron_cfg.context_parallel_size, f"{MEGATRON}.context_parallel_size"
    if size == 1:
        return
    if not on_gpus(config):
        rule_text = "needs Transformer Engine's attention, which runs on GPUs"
        yield Violation(key, size, rule_text, f"{key}=1, or cluster.gpus_per_node={size} on a machine with GPUs")
    elif batch_mode(config.policy, on_gpu=True) != "packed":
        rule_text = "splits packed sequences only, and policy.sequence_packing is off"
        fix = "policy.sequence_packing.enabled=true policy.dynamic_batching.enabled=false policy.precision=bfloat16"
        yield Violation(key, size, rule_text, f"{fix}, or {key}=1")


@rule(
    *CLUSTER,
    *_BATCHING,
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


@rule(
    f"{MEGATRON}.peft",
    f"{MEGATRON}.expert_model_parallel_size",
    f"{MEGATRON}.fine_grained_activation_offloading",
)
def adapters_agree_with_the_rest(config: Config) -> Iterator[Violation]:
    parallel, key = config.policy.megatron_cfg, f"{MEGATRON}.peft.enabled"
    spread = parallel.expert_model_parallel_size > 1
    if parallel.peft.enabled and spread and {"linear_fc1", "linear_fc2"} & set(parallel.peft.target_modules):
        # megatron-bridge would merge one rank's adapters into the experts of all.
        rule_text = "adapters of experts that are spread over ranks would be exported wrongly"
        fix = f"'{MEGATRON}.peft.target_modules=[linear_qkv,linear_proj]', or {MEGATRON}.expert_model_parallel_size=1"
        yield Violation(key, True, rule_text, fix)
    if parallel.peft.enabled and parallel.fine_grained_activation_offloading:
        other = f"{MEGATRON}.fine_grained_activation_offloading"
        rule_text = "activations are brought back by gradients of weights that are frozen then"
        yield Violation(other, True, rule_text, f"{other}=false, or {MEGATRON}.activation_checkpointing=true instead")


@rule(f"{MEGATRON}.peft", f"{MEGATRON}.tensor_model_parallel_size")
def adapters_can_be_split(config: Config) -> Iterator[Violation]:
    peft, tensor = config.policy.megatron_cfg.peft, config.policy.megatron_cfg.tensor_model_parallel_size
    if peft.enabled and peft.dim % tensor:
        key = f"{MEGATRON}.peft.dim"
        fix = f"{key}={-(-peft.dim // tensor) * tensor}"
        yield Violation(key, peft.dim, f"is split over tensor-parallel ranks ({tensor})", fix)
    if peft.enabled and len(set(peft.target_modules)) < len(peft.target_modules):
        key = f"{MEGATRON}.peft.target_modules"
        once = ",".join(dict.fromkeys(peft.target_modules))
        yield Violation(key, peft.target_modules, "names a module twice", f"'{key}=[{once}]'")


@rule(*PARALLEL, "policy.train_global_batch_size")
def ranks_share_the_global_batch(config: Config) -> Iterator[Violation]:
    ranks, batch = parallel_dims(config).dp, config.policy.train_global_batch_size
    if ranks and batch % ranks:
        key, fix = "policy.train_global_batch_size", f"a multiple of {ranks}, or another number of ranks"
        yield Violation(key, batch, f"must be a multiple of the data-parallel size ({ranks})", fix)


@rule(
    *PARALLEL,
    *_BATCHING,
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
