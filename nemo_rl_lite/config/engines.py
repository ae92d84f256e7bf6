"""The table of generation engines, so that other packages need no engine's name.

A new engine needs a class with the methods of `generation.interface.Engine`, a name in `GenerationConfig.backend`, and
a row here. The row has the class's dotted path.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_rl_lite.compat.versions import KERNEL_RELEASE, fits, is_cpu_build
from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.schema import Config, GenerationConfig, PolicyConfig
from nemo_rl_lite.config.sizes import (
    engine_share,
    engines,
    leaving_for_generation,
    on_gpus,
    samples_per_step,
    sleep_is_wanted,
)

# vLLM's quantisations of the linear weights of a refit, all with dynamic scales of activations.
VLLM_QUANTIZATIONS = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
# Options of vLLM that trade precision for speed or memory. Responses have the same distribution up to rounding.
_ROUNDING = (
    *("quantization", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "calculate_kv_scales"),
    *("attention_backend", "attention_config"),
)
# vLLM's name for attention kernels of others; here cascade attention by prompt.
CASCADE = "CUSTOM"
# LoRA ranks with a vLLM kernel. Smaller adapters are padded with zeros.
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Longest text that an n-gram draft looks up.
_LOOKUP = {"prompt_lookup_max": 3}
# vLLM's methods of speculation that need no draft model.
_TEXT_METHODS = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True)
class EngineHost:
    """One host of an engine with several ranks. `addresses`: IP address and free port of each of its hosts; the engine
    core is on the first."""

    index: int
    addresses: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Engine:
    """One engine. `worker` is the dotted path of its class, `package` what must be installed for it."""

    worker: str
    package: str
    kv_bytes: Callable[[Config, int, int, int | None], int]
    """Return the bytes of the KV cache per device. Arguments: configuration, bytes of a token's cache, of the weights,
    and of the device (None if unknown). Raises ValueError: the device's size is needed."""
    follower: str | None = None
    """Dotted path of the class for the other hosts of an engine that spans several, with the arguments of `worker`.
    None: an engine is on one host."""
    environment: Callable[[GenerationConfig, bool], dict[str, str]] = lambda generation, on_gpu: {}
    """Return the environment variables of its process. The second argument is True on GPUs."""
    can_sleep: bool = False
    """On a GPU, it has a sleep mode."""
    takes_share: bool = False
    """On a GPU, it allocates `gpu_memory_utilization` of the device at its start."""
    spans_gpus: bool = False
    """One engine can use several GPUs."""
    serves_adapters: bool = False
    """It can apply LoRA adapters itself."""
    records_experts: bool = False
    """It returns the routed experts of each token."""
    takes_options: bool = False
    """It takes `ServedOptions`: penalties, top logprobs and a JSON schema."""
    speculates: bool = False
    """It verifies drafts of several tokens in one pass."""
    caches_latents: bool = False
    """On a GPU, it caches the compressed keys and values of latent attention."""
    needs_cpu_build: bool = False
    """On a CPU, it needs its package's build for CPUs."""
    least_cpu_head_dim: int = 1
    """Smallest head dimension on a CPU."""
    precisions: tuple[tuple[str, ...], ...] = ()
    """Settings that change its rounding and speed on GPUs, as overrides."""
    temperatures: tuple[float, float] = (0.0, math.inf)
    """Lowest and highest sampling temperature that it applies unchanged, apart from 0."""


def chosen_attention(options: Mapping[str, Any]) -> str | None:
    """Return the attention backend that vLLM's options choose; None if vLLM and the launcher decide."""
    attention = options.get("attention_config")
    return options.get("attention_backend") or (attention.get("backend") if isinstance(attention, Mapping) else None)


def _vllm_precisions() -> tuple[tuple[str, ...], ...]:
    """Return FP8 weights of each kind, an FP8 KV cache, both, and other attention kernels."""
    key = "++generation.vllm_kwargs"
    weights, cache = [f"{key}.quantization={way}" for way in VLLM_QUANTIZATIONS], f"{key}.kv_cache_dtype=fp8"
    own = [CASCADE] if fits("vllm", KERNEL_RELEASE) else []
    kernels = [f"{key}.attention_backend={kind}" for kind in ("FLASHINFER", "TRITON_ATTN", *own)]
    return *((one,) for one in (*weights, cache, *kernels)), (f"{key}.quantization=fp8_per_channel", cache)


def _vllm_environment(generation: GenerationConfig, on_gpu: bool) -> dict[str, str]:
    common = {
        # The engine core runs in the engine's own process: one process less to start, to stop and to lose.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if on_gpu:
        # This sampler needs no other package. The processes of a tensor-parallel engine are spawned, since CUDA does
        # not survive a fork.
        return common | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return common | {
        "VLLM_CPU_KVCACHE_SPACE": str(generation.vllm_cfg.cpu_kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The CPU build has no kernel for latent attention. It then caches whole keys and values.
        "VLLM_MLA_DISABLE": "1",
        # Otherwise a C++ compiler compiles the sampler at the first call (6 to 37 s).
        "TORCH_COMPILE_DISABLE": "1",
    }


def _vllm_cache(config: Config, token_bytes: int, weights: int, device_bytes: int | None) -> int:
    """Return vLLM's share of a GPU minus the weights, working memory included."""
    if not on_gpus(config):
        return config.generation.vllm_cfg.cpu_kv_cache_gib * 2**30
    if device_bytes is None:
        raise ValueError("the size of the KV cache depends on the size of the GPU's memory, which is unknown")
    return max(0, int(engine_share(config.generation) * device_bytes) - weights)


def _transformers_cache(config: Config, token_bytes: int, weights: int, device_bytes: int | None) -> int:
    """Return the cache of the largest batch of `generate` with sequences of maximum length."""
    rows = min(config.generation.vllm_cfg.max_num_seqs, -(-samples_per_step(config) // engines(config)))
    return rows * config.policy.max_total_sequence_length * token_bytes


ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        worker="nemo_rl_lite.generation.vllm.worker.VLLMEngine",
        package="vllm",
        follower="nemo_rl_lite.generation.vllm.follower.VLLMFollower",
        kv_bytes=_vllm_cache,
        environment=_vllm_environment,
        can_sleep=True,
        takes_share=True,
        spans_gpus=True,
        serves_adapters=True,
        records_experts=True,
        takes_options=True,
        speculates=True,
        precisions=_vllm_precisions(),
        caches_latents=True,
        needs_cpu_build=True,
        least_cpu_head_dim=32,
        # vLLM rejects T > 2 and clamps T < 0.01, so its logprobs would differ from the policy's.
        temperatures=(0.01, 2.0),
    ),
    "transformers": Engine(
        worker="nemo_rl_lite.generation.transformers.TransformersEngine",
        package="transformers",
        kv_bytes=_transformers_cache,
    ),
}


def engine_of(config: Config) -> Engine:
    """Return the row of the configuration's engine."""
    return ENGINES[config.generation.backend]


def has_build(engine: Engine, on_gpu: bool) -> bool:
    """Return whether the installed build of an engine's package runs on GPUs, or on CPUs."""
    return on_gpu or not engine.needs_cpu_build or is_cpu_build(engine.package)


def engines_sleep(config: Config) -> bool:
    """Return whether engines sleep between generation phases."""
    shares = config.generation.colocated.enabled and on_gpus(config)
    return shares and engine_of(config).can_sleep and sleep_is_wanted(config)


def engines_leave_room(config: Config) -> bool:
    """Return whether engines stay awake on GPUs that they share with a policy, which stays there, too. Whether they do
    is open until the model and the GPU are known."""
    return config.generation.colocated.sleep is False and not leaving_for_generation(config.policy)


def engines_quantize(generation: GenerationConfig) -> bool:
    """Return whether engines quantise the weights of a refit."""
    return generation.vllm_kwargs.get("quantization") in VLLM_QUANTIZATIONS


def rounding_options(generation: GenerationConfig) -> dict[str, Any]:
    """Return the options of the engines that change their rounding."""
    given = generation.vllm_kwargs.items()
    return {name: value for name, value in given if name in _ROUNDING and value not in (None, False, "auto")}


def plain_engines(generation: GenerationConfig) -> GenerationConfig:
    """Return the settings without `rounding_options`."""
    kept = {name: value for name, value in generation.vllm_kwargs.items() if name not in _ROUNDING}
    return replace(generation, vllm_kwargs=kept)


def engines_serve_adapters(generation: GenerationConfig, policy: PolicyConfig) -> bool:
    """Return whether refits transfer only LoRA adapters, and engines apply them to the base weights."""
    wanted = policy.megatron_cfg.peft.enabled and generation.vllm_cfg.lora == "adapters"
    return wanted and ENGINES[generation.backend].serves_adapters


def engines_share_weights(config: Config) -> bool:
    """Return whether LoRA's frozen weights are in memory once, shared by policy rank and engine (`refit.cuda_ipc`). The
    engine must apply the adapters itself and never sleep."""
    shares = generates(config) and config.generation.colocated.enabled and on_gpus(config)
    serves = engines_serve_adapters(config.generation, config.policy)
    return shares and serves and config.refit.cuda_ipc and not engines_sleep(config)


def speculation(generation: GenerationConfig) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config`; None without speculation. Entries of `generation.vllm_kwargs` win."""
    if not ENGINES[generation.backend].speculates:
        return None
    own: dict[str, Any] | None = generation.vllm_kwargs.get("speculative_config")
    if generation.speculation is None or not isinstance(own, dict | None):
        return own
    options: dict[str, Any] = {"method": generation.speculation, "num_speculative_tokens": generation.draft_tokens}
    if generation.speculation == "ngram":
        options |= _LOOKUP
    elif generation.speculation != "mtp" and generation.draft_model is not None:
        folder = Path(generation.draft_model).expanduser()
        options["model"] = str(folder.resolve()) if folder.is_dir() else generation.draft_model
    return options | (own or {})


def has_draft_model(generation: GenerationConfig) -> bool:
    """Return whether engines load weights of a draft, which refits do not change."""
    options = speculation(generation)
    return options is not None and options.get("method") not in _TEXT_METHODS
