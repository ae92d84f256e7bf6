"""Rules about Megatron's options for large models: overrides of its fields, recomputation, experts, precision."""

import dataclasses
import difflib
from collections.abc import Iterator
from importlib.util import find_spec

from nemo_rl_lite.compat.megatron_fields import field_value, provider_fields
from nemo_rl_lite.config.schema import Config, MegatronConfig
from nemo_rl_lite.config.sizes import batch_mode, on_gpus, parallel_dims, recomputed_modules
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.models.shape import known_shape
from nemo_rl_lite.validation.compose import rule
from nemo_rl_lite.validation.layout import MEGATRON

_OVERRIDES, _RECOMPUTED = f"{MEGATRON}.model_overrides", f"{MEGATRON}.recompute_modules"
_DISPATCHER, _FP8 = f"{MEGATRON}.moe_token_dispatcher_type", f"{MEGATRON}.fp8_cfg.enabled"
_KEYS = ("policy.", "cluster.", "algorithm.seed")
_SHAPE = "the model's config.json"
_LOSS = "the loss of algorithm.loss_fn, which has no other terms"
# Fields that the launcher sets, in addition to the keys of `policy.megatron_cfg`, and what decides them.
_OWNED = {
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16", "fp16_lm_cross_entropy"), "policy.precision"),
    **dict.fromkeys(("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"), _LOSS),
    **dict.fromkeys(("calculate_per_token_loss", "mtp_num_layers", "cross_entropy_loss_fusion"), _LOSS),
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"), _SHAPE),
    **dict.fromkeys(("num_query_groups", "vocab_size", "num_moe_experts", "moe_ffn_hidden_size"), _SHAPE),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_embeddings_and_output_weights"), _SHAPE),
    **dict.fromkeys(("moe_layer_freq", "moe_router_topk"), _SHAPE),
    "pipeline_model_parallel_layout": f"{MEGATRON}.num_layers_in_first_pipeline_stage",
    **dict.fromkeys(("fp8", "fp8_recipe", "fp8_param"), f"{MEGATRON}.fp8_cfg"),
    "fp4_param": "refits and checkpoints, which need weights that are not quantized",
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), f"{MEGATRON}.cuda_graph_impl"),
    "moe_enable_deepep": _DISPATCHER,
    "hierarchical_context_parallel_sizes": "Transformer Engine, which does not support it for packed sequences",
    "variable_seq_lengths": f"{MEGATRON}.pipeline_model_parallel_size",
    "moe_enable_routing_replay": "policy.router_replay.enabled",
    "use_cpu_initialization": "cluster.gpus_per_node",
    "transformer_impl": "cluster.gpus_per_node",
    "cpu_offloading": f"{MEGATRON}.fine_grained_activation_offloading",
    "overlap_moe_expert_parallel_comm": "the launcher's passes, which megatron-core would replace",
    "seed": "algorithm.seed",
}


@rule(_OVERRIDES)
def check_overrides(config: Config) -> Iterator[Violation]:
    """Refuse unknown fields, which megatron-core ignores, and fields that the launcher sets."""
    fields, ours = provider_fields(), {field.name for field in dataclasses.fields(MegatronConfig)}
    for name, value in config.policy.megatron_cfg.model_overrides.items() if fields else ():
        key, owner = f"{_OVERRIDES}.{name}", f"{MEGATRON}.{name}" if name in ours else _OWNED.get(name)
        if owner is not None:
            fix = f"set {owner} instead" if owner.startswith(_KEYS) else f"remove {key}"
            yield Violation(key, value, f"is decided by {owner}", fix)
        elif name not in fields:
            near = difflib.get_close_matches(name, sorted({*fields, *ours}), n=3)
            fix = f"did you mean {' or '.join(near)}?" if near else f"remove {key}"
            yield Violation(key, value, "Megatron Core and megatron-bridge have no such field", fix)
        else:
            try:
                field_value(name, value)
            except ValueError as error:
                yield Violation(key, value, str(error), f"another value, or remove {key}")


@rule("cluster", MEGATRON, "policy.model_name")
def check_recomputation(config: Config) -> Iterator[Violation]:
    """Refuse modules that megatron-core refuses when it builds the model."""
    modules, model = recomputed_modules(config.policy.megatron_cfg), known_shape(config.policy.model_name)
    absent = {}
    if not (on_gpus(config) and config.policy.megatron_cfg.moe_grouped_gemm):
        absent["moe_act"] = f"needs {MEGATRON}.moe_grouped_gemm on GPUs"
    if model is not None and not model.shared_ffn:
        absent["shared_experts"] = "needs a model with shared experts"
    elif on_gpus(config) and config.policy.megatron_cfg.moe_shared_expert_overlap:
        absent["shared_experts"] = f"excludes {MEGATRON}.moe_shared_expert_overlap"
    if unusable := [name for name in modules if name in absent]:
        others = [name for name in modules if name not in absent]
        fix = f"'{_RECOMPUTED}=[{','.join(others)}]'" if others else f"{MEGATRON}.recompute_granularity=full"
        yield Violation(_RECOMPUTED, modules, "; ".join(f"{name} {absent[name]}" for name in unusable), fix)


@rule("cluster", "generation.colocated", MEGATRON, "policy.model_name")
def check_experts(config: Config) -> Iterator[Violation]:
    """Refuse a token exchange without its conditions, and experts that ranks cannot share."""
    parallel, model, dims = config.policy.megatron_cfg, known_shape(config.policy.model_name), parallel_dims(config)
    if model is not None and not model.experts:
        return
    if model is not None and model.expert_ffn % dims.etp:
        key, width = f"{MEGATRON}.expert_tensor_parallel_size", model.expert_ffn
        yield Violation(key, dims.etp, f"must divide the width of the model's experts ({width})", f"{key}=1")
    if not on_gpus(config) or parallel.moe_token_dispatcher_type != "flex":
        return
    other = f"{_DISPATCHER}=alltoall"
    if parallel.moe_router_dtype != "fp32":
        rule_text = "needs routers in float32"
        yield Violation(_DISPATCHER, "flex", rule_text, f"{MEGATRON}.moe_router_dtype=fp32, or {other}")
    if parallel.moe_flex_dispatcher_backend == "deepep" and dims.ep * dims.etp == 1:
        yield Violation(_DISPATCHER, "flex", "needs experts on several ranks", other)
    # A machine without Transformer Engine only plans or submits the run.
    if find_spec("transformer_engine") and not find_spec("deep_ep"):
        yield Violation(_DISPATCHER, "flex", "the package deep_ep is not installed here", other)


@rule("cluster", "policy")
def check_low_precision(config: Config) -> Iterator[Violation]:
    """Refuse batches and optimizers that FP8 and low-precision moments do not support."""
    if not on_gpus(config):
        return
    settings, optimizer = config.policy.megatron_cfg.optimizer, f"{MEGATRON}.optimizer"
    if config.policy.megatron_cfg.fp8_cfg.enabled and batch_mode(config.policy, on_gpu=True) == "fixed":
        fix = f"policy.sequence_packing.enabled=auto, or {_FP8}=false"
        yield Violation(_FP8, True, "needs packed or dynamic batches", fix)
    if not settings.use_precision_aware_optimizer or settings.optimizer_cpu_offload:
        return
    key = f"{optimizer}.use_precision_aware_optimizer"
    if settings.optimizer != "adam":
        yield Violation(key, True, "needs adam", f"{optimizer}.optimizer=adam, or {key}=false")
    elif not settings.use_distributed_optimizer:
        sharded = f"{optimizer}.use_distributed_optimizer"
        yield Violation(key, True, "needs a sharded optimizer", f"{sharded}=true, or {key}=false")
