"""Arguments of a vLLM engine, equal on all its hosts except the host's own place."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_lite.compat.vllm import (
    DRAFT_ONLY,
    decode_scheduler,
    import_model_class,
    keep_first_scales,
    lengthen_head,
    offer_cascade_attention,
    prefer_second_runner,
    repair_cpu_build,
)
from nemo_rl_lite.compat.vllm_decoding import allow_own_attention
from nemo_rl_lite.compat.vllm_warm_up import warm_up_with
from nemo_rl_lite.config.engines import (
    EngineHost,
    chosen_attention,
    engines_quantize,
    engines_serve_adapters,
    has_draft_model,
    speculation,
)
from nemo_rl_lite.config.schema import GenerationConfig, PolicyConfig
from nemo_rl_lite.config.sizes import engine_share
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.generation.vllm import extension

# Share of the KV cache that must stay free when a new or preempted request starts. Without it, vLLM starts a preempted
# request as soon as it fits, and preempts it again a few tokens later.
WATERMARK = 0.05
EXTENSION = "nemo_rl_lite.generation.vllm.rank.RefitExtension"
DRAFT_EXTENSION = "nemo_rl_lite.generation.vllm.drafts.DraftExtension"
# Load formats whose weights the first refit replaces.
RANDOM = ("dummy", DRAFT_ONLY)
# Key of config.json in quantized models.
_QUANTIZED = "quantization_config"
# What vLLM puts in front of a draft's architecture.
_DRAFT_PREFIXES = {"eagle": "Eagle", "eagle3": "Eagle3"}


def engine_arguments(
    generation: GenerationConfig,
    policy: PolicyConfig,
    model_path: str,
    seed: int,
    on_gpu: bool,
    host: EngineHost | None,
) -> Any:
    """Prepare this process for vLLM; return its `EngineArgs`. `host`: None outside Ray actors."""
    from vllm.engine.arg_utils import EngineArgs

    settings = generation.vllm_cfg
    import_model_class(Path(model_path))
    prefer_second_runner()
    offer_cascade_attention()
    allow_own_attention(chosen_attention(generation.vllm_kwargs) is None)
    if on_gpu and engines_quantize(generation):
        keep_first_scales()
    if not on_gpu:
        repair_cpu_build()
    own, drafts = _own_options(generation, policy, Path(model_path), on_gpu), speculation(generation)
    single = settings.pipeline_parallel_size == 1
    if on_gpu and single and drafts is None and own.get("async_scheduling") is not False:
        # None selects vLLM's scheduler.
        own.setdefault("scheduler_cls", decode_scheduler())
    if host is not None and len(host.addresses) > 1:
        own |= _place(host)
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    return EngineArgs(
        model=model_path,
        dtype=policy.precision,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        enable_expert_parallel=settings.expert_parallel,
        # Inside a placement group vLLM would wait for Ray workers on GPUs that this engine already holds.
        distributed_executor_backend="mp" if ranks > 1 else "uni",
        enforce_eager=settings.enforce_eager,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=engine_share(generation),
        seed=seed,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=DRAFT_EXTENSION if has_draft_model(generation) else EXTENSION,
        # Served requests may have stop strings and JSON schemas.
        skip_tokenizer_init=not (generation.stop_strings or generation.serve.enabled),
        enable_return_routed_experts=policy.router_replay.enabled,
        **own,
    )


def engine_config(arguments: Any, generation: GenerationConfig, **more: Any) -> Any:
    """Return vLLM's configuration of the engine. `more`: arguments of `create_engine_config`."""
    from vllm.usage.usage_lib import UsageContext

    config = arguments.create_engine_config(UsageContext.LLM_CLASS, **more)
    lengthen_head(config)
    warm_up_with(sampling_arguments(Sampling.of(generation, ())))
    return config


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` that decide what it computes for each token."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        # 0: the logprob of the sampled token only.
        "logprobs": sampling.options.top_logprobs,
        "presence_penalty": sampling.options.presence_penalty,
        "frequency_penalty": sampling.options.frequency_penalty,
        "repetition_penalty": sampling.options.repetition_penalty,
    }


def _own_options(generation: GenerationConfig, policy: PolicyConfig, folder: Path, on_gpu: bool) -> dict[str, Any]:
    settings, drafts, has_draft = generation.vllm_cfg, speculation(generation), has_draft_model(generation)
    lora = policy.megatron_cfg.peft if engines_serve_adapters(generation, policy) else None
    if on_gpu:
        sleeps = generation.colocated.enabled and generation.colocated.sleep is not False
        # The first refit, before the first prompt, brings all weights or raises, so start with dummy weights.
        dummy = DRAFT_ONLY if has_draft else "dummy"
        own: dict[str, Any] = {"enable_sleep_mode": sleeps, "load_format": dummy if lora is None else "auto"}
    else:
        # vLLM's sampler on CPUs fails on a chunked prompt with a seed.
        own = {"enable_chunked_prefill": False}
    own |= {"max_model_len": policy.max_total_sequence_length, "watermark": WATERMARK}
    own |= _configured(generation.vllm_kwargs)
    if "load_format" not in generation.vllm_kwargs and json.loads((folder / "config.json").read_text()).get(_QUANTIZED):
        # The first refit brings weights that are not quantized.
        own = {"load_format": "dummy"} | own | {"hf_overrides": {_QUANTIZED: None}}
    if drafts is not None:
        # vLLM adds entries.
        own["speculative_config"] = dict(drafts)
    if drafts is not None and has_draft and (draft := Path(str(drafts.get("model")))).is_dir():
        import_model_class(draft, _DRAFT_PREFIXES.get(str(drafts.get("method")), ""))
    if lora is not None:
        own |= extension.engine_options(lora, settings.tensor_parallel_size)
    if on_gpu and not settings.enforce_eager and (tokens := _tokens_per_step(drafts, has_draft)):
        return with_graph_sizes(own, settings.max_num_seqs, tokens)
    return own


def _place(host: EngineHost) -> dict[str, Any]:
    """Return the options of one of several hosts. vLLM reads the host's own address from the environment."""
    os.environ["VLLM_HOST_IP"] = host.addresses[host.index][0]
    address, port = host.addresses[0]
    return {"nnodes": len(host.addresses), "node_rank": host.index, "master_addr": address, "master_port": port}


def _configured(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with vLLM's objects instead of dictionaries that `EngineArgs` does not convert."""
    from vllm import config

    kinds = {
        "structured_outputs_config": config.StructuredOutputsConfig,
        "profiler_config": config.ProfilerConfig,
        "kv_transfer_config": config.KVTransferConfig,
    }
    made = {name: kinds[name](**value) for name, value in options.items() if name in kinds and isinstance(value, dict)}
    return {**options, **made}


def _tokens_per_step(drafts: Mapping[str, Any] | None, has_draft: bool) -> int | None:
    """Return the tokens of a request in a decode step; None if vLLM's default sizes of CUDA graphs are better."""
    if drafts is None:
        return 1
    # vLLM's older runner, which n-gram drafts need, captures no graphs of one token per request.
    return 1 + drafts["num_speculative_tokens"] if has_draft and "num_speculative_tokens" in drafts else None


def with_graph_sizes(options: Mapping[str, Any], max_num_seqs: int, tokens: int = 1) -> dict[str, Any]:
    """Return an engine's options with fewer CUDA graph sizes than vLLM's default, unless the options set them.

    A batch is padded to the next size, which costs little while decoding is bound by memory. Each graph costs start-up
    time. `tokens`: of a request in a step with drafts; vLLM counts sizes in tokens.
    """
    compilation = options.get("compilation_config") or {}
    decides = not isinstance(compilation, Mapping) or any("cudagraph_capture_size" in name for name in compilation)
    if decides or "performance_mode" in options:
        return dict(options)
    steps = [1, 2, 4, 8, 16, *range(32, 256, 32), *range(256, 512, 64), *range(512, max_num_seqs, 128)]
    sizes = [size for size in steps if size < max_num_seqs] + [max_num_seqs]
    sizes = sorted({*sizes, *(size * tokens for size in sizes)})
    return {**options, "compilation_config": {**compilation, "cudagraph_capture_sizes": sizes}}
