"""Rules about LoRA adapters: those that the policy trains, and those that engines apply themselves."""

from collections.abc import Iterator

from nemo_rl_lite.config.engines import VLLM_LORA_RANKS, engines_serve_adapters
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.layout import MEGATRON
from nemo_rl_lite.rules.vllm import has_experts

_KEY = "generation.vllm_cfg.lora"
_MERGED = f"{_KEY}=merged"


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


@rule(
    _KEY,
    "generation.backend",
    "generation.vllm_kwargs",
    "cluster.gpus_per_node",
    "policy.model_name",
    "policy.precision",
    f"{MEGATRON}.peft",
    options=RolloutAlgorithmConfig,
)
def vllm_can_apply_the_adapters(config: Config) -> Iterator[Violation]:
    if not engines_serve_adapters(config.generation, config.policy):
        return
    dim, most, own = config.policy.megatron_cfg.peft.dim, VLLM_LORA_RANKS[-1], config.generation.vllm_kwargs
    if dim > most:
        key = f"{MEGATRON}.peft.dim"
        rule_text = f"vLLM applies adapters of at most {most} dimensions ({_KEY}=adapters)"
        yield Violation(key, dim, rule_text, f"{key}={most}, or {_MERGED}")
    if on_gpus(config) and config.policy.precision != "bfloat16":
        rule_text = f"vLLM applies adapters in bfloat16 on GPUs ({_KEY}=adapters)"
        yield Violation(
            "policy.precision", config.policy.precision, rule_text, f"policy.precision=bfloat16, or {_MERGED}"
        )
    if has_experts(config.policy.model_name):
        yield Violation(_KEY, "adapters", "a model with experts has not been tried with vLLM's adapters", _MERGED)
    if own.get("quantization") is not None:
        key = "generation.vllm_kwargs.quantization"
        rule_text = f"adapters next to quantised weights have not been tried ({_KEY}=adapters)"
        yield Violation(key, own["quantization"], rule_text, f"remove it, or {_MERGED}")
    if own.get("load_format") == "dummy":
        rule_text = f"refits bring adapters alone ({_KEY}=adapters), so the engine loads the model's weights itself"
        yield Violation("generation.vllm_kwargs.load_format", "dummy", rule_text, f"remove it, or {_MERGED}")
