"""Rules that compare the layout with the sizes in the model's config.json."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.parallel import ParallelDims
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus, parallel_dims
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.models.shape import ModelShape, NoModelError, read_model_shape
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.layout import MEGATRON, PARALLEL

REPLAY = "policy.router_replay.enabled"
_OF_ROUTERS = ("freeze_moe_router", "moe_router_dtype", "moe_router_bias_update_rate", "moe_router_fusion")
_OF_EXPERTS = ("moe_grouped_gemm", "moe_permute_fusion")


@rule(
    *PARALLEL,
    "policy.model_name",
    "policy.max_total_sequence_length",
    "generation.backend",
    f"{MEGATRON}.expert_model_parallel_size",
    f"{MEGATRON}.sequence_parallel",
    f"{MEGATRON}.cp_comm_type",
    *(f"{MEGATRON}.{name}" for name in _OF_ROUTERS),
    f"{MEGATRON}.peft",
    REPLAY,
    "generation.vllm_cfg.tensor_parallel_size",
    "generation.stop_token_ids",
)
def model_fits_the_layout(config: Config) -> Iterator[Violation]:
    try:
        model = read_model_shape(config.policy.model_name)
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError) as error:
        fix = getattr(error, "fix", "") or "give a Hugging Face model folder or a hub name (organisation/model)"
        if "smollm2" in config.policy.model_name:
            fix = "python scripts/get_smollm2.py makes models/smollm2-135m-instruct"
        elif exported := _exported(Path(config.policy.model_name)):
            fix = f"policy.model_name={exported}, which the run has exported"
        yield Violation("policy.model_name", config.policy.model_name, str(error), fix)
        return
    if model is not None:
        yield from shape_fits_the_layout(config, model)


def _exported(named: Path) -> Path | None:
    """The model in Hugging Face format that a run has exported, where `named` is the run's folder or one of its
    checkpoints."""
    inside = "checkpoints" in (named.name, named.parent.name)
    folder = named.parents[0 if named.name == "checkpoints" else 1] if inside else named
    return next((file.parent for file in sorted(folder.glob("hf*/config.json"))), None)


def shape_fits_the_layout(config: Config, model: ModelShape) -> Iterator[Violation]:
    """Yield the model sizes that the configured layout cannot split or hold."""
    tensor = config.policy.megatron_cfg.tensor_model_parallel_size
    for what, count in (
        ("attention heads", model.heads),
        ("key/value heads", model.kv_heads),
        ("tokens", model.vocabulary),
    ):
        if count % tensor:
            key = f"{MEGATRON}.tensor_model_parallel_size"
            sizes = [
                size for size in range(1, count + 1) if _splits(model.heads, model.kv_heads, model.vocabulary, size)
            ]
            yield Violation(key, tensor, f"must divide the model's {count} {what}", f"one of {sizes}")
    yield from _stages(parallel_dims(config), model.layers)
    yield from _exchanged_heads(config, model)
    yield from _experts(config, model)
    yield from _sizes_in_the_model(config, model)
    length = config.policy.max_total_sequence_length
    if length > model.max_positions:
        key = "policy.max_total_sequence_length"
        yield Violation(key, length, f"the model has {model.max_positions} positions", f"{key}={model.max_positions}")
    engine = config.generation.vllm_cfg.tensor_parallel_size
    if generates(config) and model.heads % engine:
        key = "generation.vllm_cfg.tensor_parallel_size"
        yield Violation(key, engine, f"must divide the model's {model.heads} attention heads", f"{key}=1")
    least = engine_of(config).least_cpu_head_dim
    if generates(config) and not on_gpus(config) and model.head_dim < least:
        fix = "generation=transformers, or a model with a larger head_dim"
        rule_text = f"{config.generation.backend} on a CPU needs head_dim >= {least}"
        yield Violation("policy.model_name", config.policy.model_name, rule_text, fix)


def _sizes_in_the_model(config: Config, model: ModelShape) -> Iterator[Violation]:
    peft = config.policy.megatron_cfg.peft
    if peft.enabled and peft.dim > model.hidden:
        key = f"{MEGATRON}.peft.dim"
        yield Violation(key, peft.dim, f"adapters are smaller than the model's {model.hidden} dimensions", f"{key}=32")
    unknown = [token for token in config.generation.stop_token_ids if token >= model.vocabulary]
    if generates(config) and unknown:
        key, rule_text = "generation.stop_token_ids", f"the model has {model.vocabulary} tokens, from 0 on"
        yield Violation(key, config.generation.stop_token_ids, rule_text, f"{key} without {unknown[0]}")


def _stages(dims: ParallelDims, layers: int) -> Iterator[Violation]:
    """Yield a number of layers that the pipeline stages cannot share as they are told to."""

    def spread(own: ParallelDims) -> bool:
        try:
            return bool(own.stage_layers(layers))
        except ValueError:
            return False

    if spread(dims):
        return
    told, end = dims.last_layers, "last"
    if told is None and dims.first_layers is not None:
        told, end = dims.first_layers, "first"
    size, key = f"{MEGATRON}.pipeline_model_parallel_size", f"{MEGATRON}.num_layers_in_{end}_pipeline_stage"
    possible = [count for count in range(1, layers) if spread(replace(dims, **{f"{end}_layers": count}))]
    nearest = min(possible, key=lambda count: abs(count - (told or layers / dims.pp)), default=None)
    if told is None:
        fix = f"{size}=1" if nearest is None else f"{key}={nearest}, or {size}=1"
        yield Violation(size, dims.pp, f"must divide the model's {layers} layers", fix)
    else:
        fix = f"leave {key} out" if nearest is None else f"{key}={nearest}"
        rule_text = f"leaves layers that the other pipeline stages of {dims.pp} cannot share evenly: there are {layers}"
        yield Violation(key, told, rule_text, fix)


def _exchanged_heads(config: Config, model: ModelShape) -> Iterator[Violation]:
    parallel = config.policy.megatron_cfg
    size, own = parallel.context_parallel_size, model.kv_heads // parallel.tensor_model_parallel_size
    if size > 1 and parallel.cp_comm_type == "a2a" and own % size:
        key = f"{MEGATRON}.cp_comm_type"
        rule_text = f"gives each of {size} ranks some heads, and a tensor-parallel rank has {own} key/value heads"
        yield Violation(key, "a2a", rule_text, f"{key}=p2p, or {MEGATRON}.context_parallel_size=1")


def _experts(config: Config, model: ModelShape) -> Iterator[Violation]:
    parallel, key = config.policy.megatron_cfg, f"{MEGATRON}.expert_model_parallel_size"
    size = parallel.expert_model_parallel_size
    if size > 1 and model.experts % size:
        sizes = [divisor for divisor in range(1, model.experts + 1) if model.experts % divisor == 0]
        yield Violation(key, size, f"must divide the model's {model.experts} experts", f"one of {sizes}")
    elif size > 1 and not model.experts:
        yield Violation(key, size, "the model has no experts", f"{key}=1")
    for name in _OF_ROUTERS:
        if not model.experts and (value := getattr(parallel, name)):
            fix = f"{MEGATRON}.{name}={str(type(value)()).lower() if name != 'moe_router_dtype' else 'null'}"
            yield Violation(f"{MEGATRON}.{name}", value, "the model has no experts, and so no router", fix)
    for name in _OF_EXPERTS:
        if not model.experts and not getattr(parallel, name):
            yield Violation(f"{MEGATRON}.{name}", False, "the model has no experts", f"{MEGATRON}.{name}=true")
    if config.policy.router_replay.enabled and not model.experts:
        yield Violation(REPLAY, True, "the model has no experts, and so no router", f"{REPLAY}=false")
    rate = f"{MEGATRON}.moe_router_bias_update_rate"
    if parallel.moe_router_bias_update_rate and model.experts and not model.expert_biases:
        rule_text = "has no effect: the model's routers have no biases"
        yield Violation(rate, parallel.moe_router_bias_update_rate, rule_text, f"{rate}=0.0")
    elif parallel.moe_router_bias_update_rate and parallel.peft.enabled:
        rule_text = "changes the model below the adapters, which is the reference and is not saved"
        yield Violation(rate, parallel.moe_router_bias_update_rate, rule_text, f"{rate}=0.0")
    if model.experts and parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        sequence = f"{MEGATRON}.sequence_parallel"
        rule_text = "megatron-core trains experts under tensor parallelism with sequence parallelism only"
        yield Violation(sequence, False, rule_text, f"{sequence}=true")


def _splits(heads: int, kv_heads: int, vocabulary: int, size: int) -> bool:
    return not (heads % size or kv_heads % size or vocabulary % size)
