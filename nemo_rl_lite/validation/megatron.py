"""Rules about Megatron's options for large models: overrides of its fields, and recomputation."""

import dataclasses
import difflib
from collections.abc import Iterator

from nemo_rl_lite.compat.megatron_fields import field_value, provider_fields
from nemo_rl_lite.config.schema import Config, MegatronConfig
from nemo_rl_lite.config.sizes import on_gpus, recomputed_modules
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.validation.compose import rule
from nemo_rl_lite.validation.layout import MEGATRON, known_shape

_OVERRIDES, _RECOMPUTED = f"{MEGATRON}.model_overrides", f"{MEGATRON}.recompute_modules"
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
    if unusable := [name for name in modules if name in absent]:
        others = [name for name in modules if name not in absent]
        fix = f"'{_RECOMPUTED}=[{','.join(others)}]'" if others else f"{MEGATRON}.recompute_granularity=full"
        yield Violation(_RECOMPUTED, modules, "; ".join(f"{name} {absent[name]}" for name in unusable), fix)
