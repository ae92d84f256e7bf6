"""Rules about LoRA adapters that engines apply themselves."""

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
