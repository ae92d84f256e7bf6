"""Rules about generation.vllm_kwargs, which vLLM gets as they are."""

import difflib
from collections.abc import Iterator

from nemo_rl_lite.config.engines import VLLM_QUANTIZATIONS
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.models.shape import ModelShape, NoModelError, read_model_shape
from nemo_rl_lite.rules import code
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.kwargs import misfit_of_type

# Options that the launcher sets, and the key that decides each.
_OWNED = {
    "model": "policy.model_name",
    "dtype": "policy.precision",
    "max_model_len": "policy.max_total_sequence_length",
    "tensor_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
    "data_parallel_size": "generation.data_parallel_size",
    "tokenizer": None,
    "enforce_eager": "generation.vllm_cfg.enforce_eager",
    "max_num_seqs": "generation.vllm_cfg.max_num_seqs",
    "gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
    "seed": "algorithm.seed",
    "logprobs_mode": None,
    "worker_extension_cls": None,
    "disable_log_stats": None,
    "skip_tokenizer_init": None,
    "enable_sleep_mode": "generation.colocated.enabled",
    "enable_return_routed_experts": "policy.router_replay.enabled",
    "enable_lora": "generation.vllm_cfg.lora",
    "max_loras": "generation.vllm_cfg.lora",
    "max_lora_rank": "policy.megatron_cfg.peft.dim",
    "lora_target_modules": "policy.megatron_cfg.peft.target_modules",
    "fully_sharded_loras": None,
}
# The options of speculation that leave the distribution as it is and need no weights.
_SPECULATION = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
# What vLLM 0.24 asserts when such a layer runs.
_BLOCK = 128
_EXAMPLE = "{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 3}"
# Options that would make the engine's model another than the policy's.
_OF_OTHER_MODELS = {
    "hf_overrides": "would give the engine another model than the policy has",
}


@rule("generation.vllm_kwargs", options=RolloutAlgorithmConfig)
def vllm_keeps_what_the_launcher_sets(config: Config) -> Iterator[Violation]:
    for name, value in config.generation.vllm_kwargs.items():
        key = f"generation.vllm_kwargs.{name}"
        if name in _OWNED:
            fix = f"set {_OWNED[name]} instead" if _OWNED[name] else "remove it"
            yield Violation(key, None, "is set by the launcher", fix)
        elif name in _OF_OTHER_MODELS and value:
            yield Violation(key, value, _OF_OTHER_MODELS[name], "remove it")


@rule("generation.vllm_kwargs", options=RolloutAlgorithmConfig)
def vllm_knows_its_options(config: Config) -> Iterator[Violation]:
    known = code.fields("vllm", "engine/arg_utils.py", "EngineArgs") if config.generation.vllm_kwargs else {}
    for name, value in config.generation.vllm_kwargs.items():
        key = f"generation.vllm_kwargs.{name}"
        if known and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]}?" if close else "remove it"
            yield Violation(key, value, "vLLM's EngineArgs has no such option", fix)
        elif known and (misfit := misfit_of_type(value, known[name])):
            yield Violation(key, value, f"must be {misfit.kinds}, as vLLM's EngineArgs says", f"{key}={misfit.example}")


@rule(
    "generation.vllm_kwargs",
    "cluster.gpus_per_node",
    "policy.precision",
    "policy.model_name",
    "generation.vllm_cfg.tensor_parallel_size",
    options=RolloutAlgorithmConfig,
)
def vllm_can_quantize_what_comes(config: Config) -> Iterator[Violation]:
    key, way = "generation.vllm_kwargs.quantization", config.generation.vllm_kwargs.get("quantization")
    if way is None:
        return
    if way not in VLLM_QUANTIZATIONS:
        rule = f"vLLM quantises what a refit brings in one of these ways alone: {', '.join(VLLM_QUANTIZATIONS)}"
        yield Violation(key, way, rule, f"{key}=fp8_per_channel")
    elif not on_gpus(config):
        yield Violation(key, way, "vLLM computes with FP8 weights on GPUs", "remove it, or cluster.gpus_per_node=1")
    elif config.policy.precision != "bfloat16":
        yield Violation(
            "policy.precision", config.policy.precision, f"{key} = {way} needs bfloat16", "policy.precision=bfloat16"
        )
    elif has_experts(config.policy.model_name):
        yield Violation(key, way, "no refit of quantised experts has been tried", "remove it")
    elif way == "fp8_per_block" and (width := _without_whole_blocks(config)):
        rule = f"needs layers whose inputs are a multiple of {_BLOCK} on each engine rank, and this model has {width}"
        yield Violation(key, way, rule, f"{key}=fp8_per_channel")


def has_experts(model: str) -> bool:
    shape = _shape(model)
    return shape is not None and shape.experts > 0


def _without_whole_blocks(config: Config) -> int | None:
    """The first width of a linear layer's input that is no multiple of a block's; None for a model of unknown shape."""
    shape, size = _shape(config.policy.model_name), config.generation.vllm_cfg.tensor_parallel_size
    if shape is None:
        return None
    widths = (shape.hidden, shape.heads * shape.head_dim // size, shape.ffn // size)
    return next((width for width in widths if width % _BLOCK), None)


def _shape(model: str) -> ModelShape | None:
    try:
        return read_model_shape(model)
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError):
        # Another rule says so.
        return None


@rule("generation.vllm_kwargs", options=RolloutAlgorithmConfig)
def speculation_needs_no_weights(config: Config) -> Iterator[Violation]:
    settings, key = config.generation.vllm_kwargs.get("speculative_config"), "generation.vllm_kwargs.speculative_config"
    if settings is None:
        return
    if not isinstance(settings, dict):
        yield Violation(key, settings, "must be a mapping", f"'+{key}={_EXAMPLE}'")
        return
    if settings.get("method") != "ngram":
        rule = "must be ngram: other drafts come from weights that no refit brings"
        yield Violation(f"{key}.method", settings.get("method"), rule, f"{key}.method=ngram")
    for name in ("num_speculative_tokens", "prompt_lookup_max"):
        value = settings.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Violation(f"{key}.{name}", value, "must be a whole number above 0", f"{key}.{name}=3")
    for name in sorted(settings.keys() - set(_SPECULATION)):
        close = difflib.get_close_matches(name, _SPECULATION, n=1)
        fix = f"did you mean {close[0]}?" if close else "remove it"
        yield Violation(f"{key}.{name}", settings[name], f"is none of {', '.join(_SPECULATION)}", fix)
