"""Rules about the policy: ranks, model, batches, optimizer, adapters, offload, graphs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from nemo_rl_lite.compat.versions import installed
from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import (
    ParallelDims,
    adapted_layers,
    all_gpus,
    batch_mode,
    generation_gpus,
    leaving_for_generation,
    linear_layers,
    mb_tokens,
    micro_batch_sizes,
    model_chunks,
    needs_equal_counts,
    on_gpus,
    parallel_dims,
    records_training,
    samples_per_step,
    sequences_together,
)
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.models.shape import ModelShape, NoModelError, known_shape, read_model_shape
from nemo_rl_lite.validation.compose import rule

MEGATRON = "policy.megatron_cfg"
BATCH = "policy.train_global_batch_size"
_DATA_PARALLEL = f"{MEGATRON}.distributed_data_parallel_config"
_OPTIMIZER, _SCHEDULER = f"{MEGATRON}.optimizer", f"{MEGATRON}.scheduler"
_CPU, _SHARDED = f"{_OPTIMIZER}.optimizer_cpu_offload", f"{_OPTIMIZER}.use_distributed_optimizer"
_TENSOR, _EXPERTS = f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.expert_model_parallel_size"
_SPLIT_EXPERTS = f"{MEGATRON}.expert_tensor_parallel_size"
_PIPELINE, _CONTEXT = f"{MEGATRON}.pipeline_model_parallel_size", f"{MEGATRON}.context_parallel_size"
_HYBRID = f"{MEGATRON}.hybrid_context_parallel"
_SEQUENCE, _PACKING = f"{MEGATRON}.sequence_parallel", "policy.sequence_packing.enabled"
_SHARED = "policy.sequence_packing.shared_prompts"
_ACTIVATIONS, _MODULES = f"{MEGATRON}.fine_grained_activation_offloading", f"{MEGATRON}.offload_modules"
_REPLAY, _FUSION = "policy.router_replay.enabled", f"{MEGATRON}.moe_router_fusion"
_GRAPHS, _PEFT = f"{MEGATRON}.cuda_graph_impl", f"{MEGATRON}.peft"
_RANKS = ("cluster", "generation.colocated", MEGATRON)


@rule("cluster")
def check_cpu_ranks(config: Config) -> Iterator[Violation]:
    nodes, ranks = config.cluster.num_nodes, config.cluster.cpu_ranks
    if not on_gpus(config) and ranks % nodes:
        fix = f"cluster.cpu_ranks={-(-ranks // nodes) * nodes}, or cluster.num_nodes=1"
        yield Violation("cluster.cpu_ranks", ranks, f"must be a multiple of the {nodes} nodes (cluster.num_nodes)", fix)


@rule("cluster", "policy.precision")
def check_gpu_precision(config: Config) -> Iterator[Violation]:
    if on_gpus(config) and config.policy.precision == "float32":
        fix = "policy=megatron_gpu, or policy.precision=bfloat16"
        yield Violation("policy.precision", "float32", "is not supported on GPUs", fix)


@rule("cluster", "generation.colocated", options=RolloutAlgorithmConfig)
def check_generation_gpus(config: Config) -> Iterator[Violation]:
    if not on_gpus(config) or config.generation.colocated.enabled:
        return
    prefix, resources = "generation.colocated.resources", config.generation.colocated.resources
    gpus, total = generation_gpus(config), all_gpus(config)
    if resources.num_nodes is not None and resources.gpus_per_node not in (None, config.cluster.gpus_per_node):
        rule_text = "num_nodes and gpus_per_node exclude each other"
        yield Violation(f"{prefix}.gpus_per_node", resources.gpus_per_node, rule_text, f"{prefix}.gpus_per_node=null")
    elif not 0 < gpus < total:
        name = "num_nodes" if resources.num_nodes is not None else "gpus_per_node"
        rule_text = f"gives generation {gpus} of {total} GPUs; generation and policy each need at least one"
        fix = f"{prefix}.gpus_per_node=1" if total > 1 else "generation.colocated.enabled=true"
        yield Violation(f"{prefix}.{name}", getattr(resources, name), rule_text, fix)


@rule(*_RANKS)
def check_parallel_groups(config: Config) -> Iterator[Violation]:
    dims = parallel_dims(config)
    # `check_generation_gpus` refuses a policy without ranks.
    if dims.world and not dims.fills_world:
        more = "more GPUs" if on_gpus(config) else f"cluster.cpu_ranks={dims.replica}"
        sizes = f"tensor ({dims.tp}) x pipeline ({dims.pp})" + (f" x context ({dims.cp})" if dims.cp > 1 else "")
        key, size = (_CONTEXT, dims.cp) if dims.cp > 1 and dims.tp * dims.pp == 1 else (_TENSOR, dims.tp)
        rule_text = f"{sizes} parallel size must divide the number of policy ranks ({dims.world})"
        yield Violation(key, size, rule_text, f"{more}, or smaller parallel sizes")
    elif dims.stage % (dims.ep * dims.etp):
        split = f"times {_SPLIT_EXPERTS} ({dims.etp}) " if dims.etp > 1 else ""
        rule_text = f"{split}must divide the ranks per pipeline stage ({dims.stage})"
        yield Violation(_EXPERTS, dims.ep, rule_text, f"{_EXPERTS}=1{f' {_SPLIT_EXPERTS}=1' if split else ''}")


@rule("cluster", MEGATRON)
def check_sequence_parallel(config: Config) -> Iterator[Violation]:
    parallel = config.policy.megatron_cfg
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1 and not on_gpus(config):
        yield Violation(_SEQUENCE, True, "is not supported on CPUs", f"{_SEQUENCE}=false")


@rule("cluster", "policy")
def check_context_parallel(config: Config) -> Iterator[Violation]:
    size = config.policy.megatron_cfg.context_parallel_size
    if size == 1:
        return
    if not on_gpus(config):
        rule_text = "needs GPUs, for Transformer Engine's attention"
        fix = f"{_CONTEXT}=1, or cluster.gpus_per_node={size} on a machine with GPUs"
        yield Violation(_CONTEXT, size, rule_text, fix)
    elif batch_mode(config.policy, on_gpu=True) != "packed":
        rule_text = "needs policy.sequence_packing"
        fix = f"{_PACKING}=true policy.dynamic_batching.enabled=false policy.precision=bfloat16, or {_CONTEXT}=1"
        yield Violation(_CONTEXT, size, rule_text, fix)
    elif config.policy.sequence_packing.shared_prompts is True:
        rule_text = f"excludes context parallelism ({_CONTEXT}={size})"
        yield Violation(_SHARED, True, rule_text, f"{_SHARED}=auto, or {_CONTEXT}=1")
    rate = config.policy.megatron_cfg.moe_router_bias_update_rate
    if config.policy.megatron_cfg.hybrid_context_parallel and rate:
        # Ranks with fewer sequences repeat some.
        rule_text = f"makes routers count tokens twice ({MEGATRON}.moe_router_bias_update_rate={rate:g})"
        yield Violation(_HYBRID, True, rule_text, f"{_HYBRID}=false")


@rule("cluster", "policy", "generation")
def check_model(config: Config) -> Iterator[Violation]:
    name = config.policy.model_name
    try:
        model = read_model_shape(name)
    except NoModelError as error:
        fix = error.fix or "give a Hugging Face model folder or a Hub model ID (organisation/model)"
        if "smollm2" in name:
            fix = "python scripts/get_smollm2.py makes models/smollm2-135m-instruct"
        elif exported := _exported(Path(name)):
            fix = f"policy.model_name={exported}, which the run has exported"
        yield Violation("policy.model_name", name, str(error), fix)
        return
    if model is not None:
        yield from shape_fits_the_layout(config, model)


def _exported(named: Path) -> Path | None:
    """Return the exported model of a run, where `named` is the run's folder or one of its checkpoints."""
    inside = "checkpoints" in (named.name, named.parent.name)
    folder = named.parents[0 if named.name == "checkpoints" else 1] if inside else named
    return next((file.parent for file in sorted(folder.glob("hf*/config.json"))), None)


def shape_fits_the_layout(config: Config, model: ModelShape) -> Iterator[Violation]:
    """Yield model sizes that the layout cannot split."""
    tensor = config.policy.megatron_cfg.tensor_model_parallel_size
    split = {"attention heads": model.heads, "key/value heads": model.kv_heads, "vocabulary entries": model.vocabulary}
    if odd := [f"{count} {what}" for what, count in split.items() if count % tensor]:
        sizes = [size for size in range(1, model.kv_heads + 1) if not any(count % size for count in split.values())]
        yield Violation(_TENSOR, tensor, f"must divide the model's {' and '.join(odd)}", f"one of {sizes}")
    yield from _stages(parallel_dims(config), model.layers)
    yield from _experts(config, model)
    context, heads = config.policy.megatron_cfg.context_parallel_size, model.kv_heads // tensor
    if context > 1 and config.policy.megatron_cfg.cp_comm_type == "a2a" and heads % context:
        key = f"{MEGATRON}.cp_comm_type"
        rule_text = f"needs a multiple of {context} KV heads per tensor-parallel rank, and there are {heads}"
        yield Violation(key, "a2a", rule_text, f"{key}=p2p, or {_CONTEXT}=1")
    length = config.policy.max_total_sequence_length
    if length > model.max_positions:
        key = "policy.max_total_sequence_length"
        yield Violation(key, length, f"the model has {model.max_positions} positions", f"{key}={model.max_positions}")
    if generates(config):
        yield from _engine(config, model)


def _engine(config: Config, model: ModelShape) -> Iterator[Violation]:
    size, least = config.generation.vllm_cfg.tensor_parallel_size, engine_of(config).least_cpu_head_dim
    if model.heads % size:
        key = "generation.vllm_cfg.tensor_parallel_size"
        yield Violation(key, size, f"must divide the model's {model.heads} attention heads", f"{key}=1")
    if (stages := config.generation.vllm_cfg.pipeline_parallel_size) > model.layers:
        key = "generation.vllm_cfg.pipeline_parallel_size"
        yield Violation(key, stages, f"the model has {model.layers} layers", f"{key}=1")
    if not on_gpus(config) and model.head_dim < least:
        fix = "generation=transformers, or a model with a larger head_dim"
        rule_text = f"{config.generation.backend} on a CPU needs head_dim >= {least}"
        yield Violation("policy.model_name", config.policy.model_name, rule_text, fix)
    if unknown := [token for token in config.generation.stop_token_ids if token >= model.vocabulary]:
        key, rule_text = "generation.stop_token_ids", f"must be below the vocabulary size {model.vocabulary}"
        yield Violation(key, config.generation.stop_token_ids, rule_text, f"{key} without {unknown[0]}")


def _stages(dims: ParallelDims, layers: int) -> Iterator[Violation]:
    """Yield a violation if the pipeline stages cannot share the layers as configured."""

    def spread(own: ParallelDims) -> bool:
        try:
            return bool(own.stage_layers(layers))
        except ValueError:
            return False

    if spread(dims):
        yield from _chunks(dims, layers)
        return
    told, end = dims.last_layers, "last"
    if told is None and dims.first_layers is not None:
        told, end = dims.first_layers, "first"
    key = f"{MEGATRON}.num_layers_in_{end}_pipeline_stage"
    possible = [count for count in range(1, layers) if spread(replace(dims, **{f"{end}_layers": count}))]
    nearest = min(possible, key=lambda count: abs(count - (told or layers / dims.pp)), default=None)
    if told is None:
        fix = f"{_PIPELINE}=1" if nearest is None else f"{key}={nearest}, or {_PIPELINE}=1"
        yield Violation(_PIPELINE, dims.pp, f"must divide the model's {layers} layers", fix)
    else:
        fix = f"leave {key} out" if nearest is None else f"{key}={nearest}"
        rule_text = (
            f"leaves layers that the other {dims.pp - 1} pipeline stages cannot share evenly (the model has {layers})"
        )
        yield Violation(key, told, rule_text, fix)


def _chunks(dims: ParallelDims, layers: int) -> Iterator[Violation]:
    """Yield a violation if model chunks cannot share the layers of a stage."""
    counts = dims.stage_layers(layers)
    if odd := next((count for count in counts if count % dims.chunks), None):
        sizes = [size for size in range(1, min(counts) + 1) if not any(count % size for count in counts)]
        key = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
        yield Violation(key, dims.chunks, f"must divide the {odd} layers of a pipeline stage", f"one of {sizes}")


def _experts(config: Config, model: ModelShape) -> Iterator[Violation]:
    parallel, size = config.policy.megatron_cfg, config.policy.megatron_cfg.expert_model_parallel_size
    if not model.experts:
        if size > 1:
            yield Violation(_EXPERTS, size, "needs a MoE model", f"{_EXPERTS}=1")
        if config.policy.router_replay.enabled:
            yield Violation(_REPLAY, True, "needs a MoE model", f"{_REPLAY}=false")
        return
    if model.experts % size:
        sizes = [divisor for divisor in range(1, model.experts + 1) if model.experts % divisor == 0]
        yield Violation(_EXPERTS, size, f"must divide the model's {model.experts} experts", f"one of {sizes}")
    if parallel.moe_router_bias_update_rate and model.expert_biases and parallel.peft.enabled:
        rate = f"{MEGATRON}.moe_router_bias_update_rate"
        rule_text = "changes the base model, which LoRA does not save and uses as reference"
        yield Violation(rate, parallel.moe_router_bias_update_rate, rule_text, f"{rate}=0.0")
    if parallel.moe_router_bias_update_rate and model.expert_biases and model_chunks(parallel) > 1:
        rate = f"{MEGATRON}.moe_router_bias_update_rate"
        rule_text = "would count tokens of the micro-batches that fill up interleaved stages"
        yield Violation(rate, parallel.moe_router_bias_update_rate, rule_text, f"{rate}=0.0")
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        rule_text = "MoE models with tensor parallelism need sequence parallelism"
        yield Violation(_SEQUENCE, False, rule_text, f"{_SEQUENCE}=true")


@rule(MEGATRON, _REPLAY)
def check_router_fusion(config: Config) -> Iterator[Violation]:
    """Refuse other types: the kernel keeps scores in the logits' type, megatron-core in float32; it has no float64."""
    parallel, key = config.policy.megatron_cfg, f"{MEGATRON}.moe_router_dtype"
    if parallel.moe_router_fusion and parallel.moe_router_dtype != "fp32":
        yield Violation(_FUSION, True, "needs routers in float32", f"{key}=fp32, or {_FUSION}=false")
    if parallel.moe_router_fusion and config.policy.router_replay.enabled:
        rule_text = "is incompatible with router replay: the kernel chooses the experts"
        yield Violation(_FUSION, True, rule_text, f"{_FUSION}=false, or {_REPLAY}=false")


@rule("policy.tokenizer.chat_template")
def check_chat_template(config: Config) -> Iterator[Violation]:
    key, file = "policy.tokenizer.chat_template", config.policy.tokenizer.chat_template
    try:
        if file is not None:
            Path(file).expanduser().read_text()
    except (OSError, RuntimeError, ValueError) as error:
        rule_text = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        yield Violation(key, file, rule_text, "the path of a file with a Jinja template")


@rule("cluster", "policy")
def check_token_batches(config: Config) -> Iterator[Violation]:
    policy, gpu = config.policy, on_gpus(config)
    if policy.sequence_packing.enabled is True and policy.dynamic_batching.enabled:
        key = "policy.dynamic_batching.enabled"
        yield Violation(key, True, "excludes sequence packing", f"{key}=false")
        return
    if policy.sequence_packing.enabled is True and gpu and policy.precision != "bfloat16":
        yield Violation(_PACKING, True, "needs bfloat16 on GPUs", f"policy.precision=bfloat16, or {_PACKING}=false")
    mode = batch_mode(policy, gpu)
    if mode == "fixed":
        return
    section = "policy.sequence_packing" if mode == "packed" else "policy.dynamic_batching"
    for name, training in (("train_mb_tokens", True), ("logprob_mb_tokens", False)):
        together, tokens = sequences_together(config) if training else 1, mb_tokens(policy, mode, training)
        longest = together * policy.max_total_sequence_length
        if tokens < longest:
            held = "one sequence" if together == 1 else "a pair of sequences"
            rule_text = f"must hold {held} of policy.max_total_sequence_length = {longest // together} tokens"
            yield Violation(f"{section}.{name}", tokens, rule_text, f"{section}.{name}={longest}")
    tensor = policy.megatron_cfg.tensor_model_parallel_size
    if policy.megatron_cfg.sequence_parallel and policy.sequence_length_round % tensor:
        key = "policy.sequence_length_round"
        rule_text = f"must be a multiple of the tensor parallel size ({tensor}) with sequence parallelism"
        yield Violation(key, policy.sequence_length_round, rule_text, f"{key}={tensor * 64}")


@rule(*_RANKS, BATCH)
def check_global_batch(config: Config) -> Iterator[Violation]:
    ranks, batch = parallel_dims(config).dp, config.policy.train_global_batch_size
    if batch < ranks:
        yield Violation(BATCH, batch, f"must be at least the data-parallel size ({ranks})", "more, or fewer ranks")
    elif ranks and batch % ranks and needs_equal_counts(config):
        fix = f"a multiple of {ranks}, or another number of ranks"
        yield Violation(BATCH, batch, f"must be a multiple of the data-parallel size ({ranks})", fix)


@rule(
    "cluster",
    "generation.colocated",
    "policy",
    "algorithm.num_prompts_per_step",
    "algorithm.num_generations_per_prompt",
    options=RolloutAlgorithmConfig,
)
def check_logprob_batch(config: Config) -> Iterator[Violation]:
    ranks, samples = parallel_dims(config).dp, samples_per_step(config)
    other = not ranks or samples % ranks or samples % config.policy.train_global_batch_size
    if other or batch_mode(config.policy, on_gpus(config)) != "fixed":
        return
    share, micro = samples // ranks, micro_batch_sizes(config)[1]
    if micro < share and share % micro:
        key = "policy.logprob_batch_size"
        rule_text = f"micro-batch ({micro}) x data-parallel size ({ranks}) must divide the rollout's {samples} samples"
        yield Violation(key, config.policy.logprob_batch_size, rule_text, f"{key}={share}")


@rule(_OPTIMIZER, _SCHEDULER, _DATA_PARALLEL)
def check_optimizer(config: Config) -> Iterator[Violation]:
    parallel, optimizer = config.policy.megatron_cfg, config.policy.megatron_cfg.optimizer
    scheduler, overlap = parallel.scheduler, parallel.distributed_data_parallel_config
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        yield Violation(_SHARDED, True, "is not supported with sgd", f"{_SHARDED}=false")
    gather = f"{_DATA_PARALLEL}.overlap_param_gather"
    if overlap.overlap_param_gather is True and not optimizer.use_distributed_optimizer:
        yield Violation(gather, True, "needs a sharded optimizer", f"{gather}=false, or {_SHARDED}=true")
    if overlap.overlap_param_gather is True and overlap.overlap_grad_reduce is False:
        rule_text = "needs overlap_grad_reduce"
        yield Violation(gather, True, rule_text, f"{_DATA_PARALLEL}.overlap_grad_reduce=true, or {gather}=false")
    if optimizer.min_lr > optimizer.lr:
        key = f"{_OPTIMIZER}.min_lr"
        yield Violation(key, optimizer.min_lr, f"must not exceed lr = {optimizer.lr:g}", f"{key}=0.0")
    if scheduler.lr_warmup_iters and scheduler.lr_warmup_init > optimizer.lr:
        key = f"{_SCHEDULER}.lr_warmup_init"
        yield Violation(key, scheduler.lr_warmup_init, f"must not exceed lr = {optimizer.lr:g}", f"{key}=0.0")
    if scheduler.lr_decay_style != "constant" and scheduler.lr_warmup_iters >= scheduler.lr_decay_iters:
        key = f"{_SCHEDULER}.lr_warmup_iters"
        rule_text = f"must be smaller than lr_decay_iters = {scheduler.lr_decay_iters}"
        yield Violation(key, scheduler.lr_warmup_iters, rule_text, f"{key}=0")


@rule("cluster", _OPTIMIZER, "policy.precision")
def check_cpu_optimizer(config: Config) -> Iterator[Violation]:
    settings = config.policy.megatron_cfg.optimizer
    if not settings.optimizer_cpu_offload:
        if settings.overlap_cpu_optimizer_d2h_h2d:
            key = f"{_OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d"
            yield Violation(key, True, "needs optimizer_cpu_offload", f"{key}=false")
        return
    if not on_gpus(config):
        # megatron-core would fail at the first step, because it maps CUDA parameters only.
        rule_text = "needs GPUs"
        yield Violation(_CPU, True, rule_text, f"{_CPU}=false, or offload=none")
    if settings.optimizer_offload_fraction == 0:
        key = f"{_OPTIMIZER}.optimizer_offload_fraction"
        yield Violation(key, 0, "must be greater than 0 with optimizer_cpu_offload", f"{key}=1.0, or {_CPU}=false")
    if settings.optimizer != "adam":
        key = f"{_OPTIMIZER}.optimizer"
        yield Violation(key, settings.optimizer, "optimizer_cpu_offload needs adam", f"{key}=adam, or {_CPU}=false")
    elif not settings.use_distributed_optimizer:
        rule_text = "optimizer_cpu_offload needs a sharded optimizer"
        yield Violation(_SHARDED, False, rule_text, f"{_SHARDED}=true, or {_CPU}=false")


@rule("cluster", MEGATRON, "policy.model_name")
def check_activation_offload(config: Config) -> Iterator[Violation]:
    parallel, modules = config.policy.megatron_cfg, config.policy.megatron_cfg.offload_modules
    if not parallel.fine_grained_activation_offloading:
        return
    if not on_gpus(config):
        yield Violation(_ACTIVATIONS, True, "needs GPUs", f"{_ACTIVATIONS}=false, or offload=none")
    if parallel.activation_checkpointing and parallel.recompute_granularity == "full":
        key = f"{MEGATRON}.activation_checkpointing"
        rule_text = "of complete layers excludes fine_grained_activation_offloading: there are no inputs to offload"
        yield Violation(key, True, rule_text, f"{key}=false, or {_ACTIVATIONS}=false")
    if parallel.peft.enabled:
        rule_text = "is incompatible with LoRA, which freezes the weights"
        fix = f"{_ACTIVATIONS}=false, or {MEGATRON}.activation_checkpointing=true instead"
        yield Violation(_ACTIVATIONS, True, rule_text, fix)
    if not modules:
        rule_text = "fine_grained_activation_offloading needs at least one module"
        shown = "null" if modules is None else modules
        yield Violation(_MODULES, shown, rule_text, f"'{_MODULES}=[core_attn]', or {_ACTIVATIONS}=false")
        return
    if "attn_proj" in modules and "core_attn" not in modules:
        rule_text = "attn_proj needs core_attn, whose output is its input"
        yield Violation(_MODULES, modules, rule_text, f"'{_MODULES}=[{','.join(['core_attn', *modules])}]'")
    if "fused_group_mlp" in modules:
        yield from _fused_experts(modules)
    if model := known_shape(config.policy.model_name):
        yield from _offloaded_modules(config, modules, model)


def _fused_experts(modules: Sequence[str]) -> Iterator[Violation]:
    own = installed("transformer-engine")
    if both := [name for name in modules if name in ("expert_fc1", "moe_act")]:
        rest = [name for name in modules if name not in both]
        rule_text = f"fused_group_mlp already includes {' and '.join(both)}"
        yield Violation(_MODULES, modules, rule_text, f"'{_MODULES}=[{','.join(rest)}]'")
    elif own and tuple(map(int, own.split(".")[:2])) < (2, 14):
        others = [*(name for name in modules if name != "fused_group_mlp"), "expert_fc1", "moe_act"]
        rule_text = f"fused_group_mlp needs Transformer Engine 2.14 or newer, and {own} is installed"
        yield Violation(_MODULES, modules, rule_text, f"'{_MODULES}=[{','.join(others)}]'")


def _offloaded_modules(config: Config, modules: Sequence[str], model: ModelShape) -> Iterator[Violation]:
    missing = () if model.experts else ("expert_fc1", "moe_act", "fused_group_mlp")
    missing += () if model.dense_layers else ("mlp",)
    absent = [name for name in modules if name in missing]
    # Transformer Engine computes these norms within the linear layer behind them; megatron-core skips them silently.
    fused = ("attn_norm",) if model.experts else ("attn_norm", "mlp_norm")
    others = [name for name in modules if name not in (*absent, *fused)]
    fix = f"'{_MODULES}=[{','.join(others or ['core_attn'])}]'"
    if absent:
        why = "has only layers with experts" if model.experts else "has no experts"
        yield Violation(_MODULES, modules, f"the model {why}, so it has no {' and no '.join(absent)}", fix)
    elif not others:
        rule_text = f"has nothing to offload: the model fuses {' and '.join(modules)} into a linear layer"
        yield Violation(_MODULES, modules, rule_text, fix)
    try:
        fewest = min(parallel_dims(config).stage_layers(model.layers))
    except ValueError:
        # `check_model` says that these layers cannot be spread.
        return
    if fewest == 1 and len(modules) > 1:
        # If no module of a layer is offloaded, megatron-core considers the layer finished after its first module.
        rule_text = "offloading several modules needs at least two layers per pipeline stage"
        yield Violation(_MODULES, modules, rule_text, f"'{_MODULES}=[{modules[0]}]', or fewer pipeline stages")


@rule(MEGATRON)
def check_adapters(config: Config) -> Iterator[Violation]:
    parallel, peft = config.policy.megatron_cfg, config.policy.megatron_cfg.peft
    if not peft.enabled:
        return
    spread = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size > 1
    tensor, shape = parallel.tensor_model_parallel_size, known_shape(config.policy.model_name)
    layers = shape.linear_layers if shape is not None else linear_layers()
    targets = adapted_layers(peft, layers)
    if shape is not None and (missing := [name for name in targets if name not in layers]):
        rule_text = f"the model has no {' and no '.join(missing)}; its linear layers are {', '.join(layers)}"
        fix = f"'{_PEFT}.target_modules=[]' for all of them, or a list of some"
        yield Violation(f"{_PEFT}.target_modules", targets, rule_text, fix)
    if spread and {"linear_fc1", "linear_fc2"} & set(targets):
        # megatron-bridge would merge one rank's adapters into the experts of all.
        rule_text = "adapters of experts need expert parallel sizes of 1"
        attention = ",".join(name for name in layers if name not in ("linear_fc1", "linear_fc2"))
        fix = f"'{_PEFT}.target_modules=[{attention}]', or {_EXPERTS}=1 {_SPLIT_EXPERTS}=1"
        yield Violation(f"{_PEFT}.enabled", True, rule_text, fix)
    if peft.dim % tensor:
        fix = f"{_PEFT}.dim={-(-peft.dim // tensor) * tensor}"
        yield Violation(f"{_PEFT}.dim", peft.dim, f"must be a multiple of the tensor parallel size ({tensor})", fix)


@rule("cluster", "policy")
def check_graphs(config: Config) -> Iterator[Violation]:
    """Refuse all that the host decides, copies or sends during a training pass: CUDA graphs cannot capture it."""
    if not records_training(config):
        return
    parallel, mode = config.policy.megatron_cfg, batch_mode(config.policy, on_gpus(config))
    exchanges, shape = "communication between ranks", known_shape(config.policy.model_name)
    overlap = parallel.distributed_data_parallel_config.overlap_grad_reduce is True
    for key, on, what, off in (
        (_TENSOR, parallel.tensor_model_parallel_size > 1, exchanges, "1"),
        (_PIPELINE, parallel.pipeline_model_parallel_size > 1, exchanges, "1"),
        (_CONTEXT, parallel.context_parallel_size > 1, exchanges, "1"),
        (_EXPERTS, parallel.expert_model_parallel_size > 1, exchanges, "1"),
        (f"{MEGATRON}.activation_checkpointing", parallel.activation_checkpointing, "recomputation", "false"),
        (_ACTIVATIONS, parallel.fine_grained_activation_offloading, "activation offloading", "false"),
        (f"{_PEFT}.enabled", parallel.peft.enabled, "adapters", "false"),
        (f"{_DATA_PARALLEL}.overlap_grad_reduce", overlap, "overlapped gradient reduction", "false"),
        (f"{MEGATRON}.fp8_cfg.enabled", parallel.fp8_cfg.enabled, "FP8 scales", "false"),
        (_REPLAY, config.policy.router_replay.enabled, "router replay", "false"),
        (_SHARED, config.policy.sequence_packing.shared_prompts is True, "shared prompts", "auto"),
    ):
        if on:
            yield Violation(key, None, f"CUDA graphs cannot capture {what}", f"{key}={off}, or {_GRAPHS}=none")
    if mode != "packed":
        rule_text = f"needs packed sequences, and batches are {mode}"
        yield Violation(_GRAPHS, "full_iteration", rule_text, f"{_PACKING}=true, or {_GRAPHS}=none")
    leaving, key = leaving_for_generation(config.policy), "policy.offload_for_generation"
    if moved := [name for name in leaving if name in ("parameters", "gradients")]:
        others = ",".join(name for name in leaving if name not in moved)
        rule_text = f"CUDA graphs need fixed addresses, and {' and '.join(moved)} are reloaded to new ones"
        yield Violation(key, list(leaving), rule_text, f"'{key}=[{others}]', or {_GRAPHS}=none")
    if shape is not None and shape.experts:
        rule_text = "CUDA graphs cannot capture MoE models"
        yield Violation(_GRAPHS, "full_iteration", rule_text, f"{_GRAPHS}=none, or a model without experts")
