"""The generation engines, one row each: what other rooms must know about an engine without asking for its name.

A new engine is a class with the methods of `generation.interface.Engine`, its name in `GenerationConfig.backend`, and a
row here. Imports nothing heavy: the class is named by a dotted path.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.schema import Config, GenerationConfig, PolicyConfig
from nemo_rl_lite.config.sizes import engine_share, engines, on_gpus, samples_per_step, sleep_is_wanted

# Ways in which vLLM quantises the linear weights that a refit brings. All compute with dynamic scales of activations.
VLLM_QUANTIZATIONS = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
# Dimensions of the adapters for which vLLM has kernels; smaller adapters are filled up with zeros.
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class CacheFacts:
    """What the size of a KV cache depends on, in bytes: a token's share on one GPU, an engine's weights on one GPU,
    and the GPU's memory (None on a CPU, or where it is unknown)."""

    token_bytes: int
    weights: int
    device_bytes: int | None


@dataclass(frozen=True)
class Engine:
    """One engine. `worker` is the dotted path of its class, `package` what must be installed for it."""

    worker: str
    package: str
    kv_bytes: Callable[[Config, CacheFacts], int]
    """Bytes of the KV cache on one of the engine's devices. Raises ValueError: the device's size is needed."""
    environment: Callable[[GenerationConfig, bool], dict[str, str]] = lambda generation, on_gpu: {}
    """What its process needs in its environment from the start; the second argument is whether it runs on a GPU."""
    can_sleep: bool = False
    """Whether, on a GPU, it gives its memory to the policy between generation phases."""
    takes_share: bool = False
    """Whether, on a GPU, it takes `gpu_memory_utilization` of the device when it starts."""
    spans_gpus: bool = False
    """Whether one engine can use several GPUs."""
    serves_adapters: bool = False
    """Whether it can apply LoRA adapters itself."""
    records_experts: bool = False
    """Whether it tells which experts it chose for each token."""
    least_cpu_head_dim: int = 1
    """The smallest head dimension that it computes on a CPU."""
    temperatures: tuple[float, float] = (0.0, math.inf)
    """The lowest and the highest sampling temperature, besides 0, that it takes as it is."""


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
        # Otherwise a C++ compiler compiles the sampler at the first call (6 to 37 s).
        "TORCH_COMPILE_DISABLE": "1",
    }


def _vllm_cache(config: Config, facts: CacheFacts) -> int:
    """On a GPU, vLLM's share of the device minus its weights; its working memory is included."""
    settings = config.generation.vllm_cfg
    if not on_gpus(config):
        return settings.cpu_kv_cache_gib * 2**30
    if facts.device_bytes is None:
        raise ValueError("the size of the KV cache depends on the size of the GPU's memory, which is unknown")
    return max(0, int(engine_share(config.generation) * facts.device_bytes) - facts.weights)


def _transformers_cache(config: Config, facts: CacheFacts) -> int:
    """The longest sequences of the largest batch that one call of `generate` can meet."""
    rows = min(config.generation.vllm_cfg.max_num_seqs, -(-samples_per_step(config) // engines(config)))
    return rows * config.policy.max_total_sequence_length * facts.token_bytes


ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        worker="nemo_rl_lite.generation.vllm.worker.VLLMEngine",
        package="vllm",
        kv_bytes=_vllm_cache,
        environment=_vllm_environment,
        can_sleep=True,
        takes_share=True,
        spans_gpus=True,
        serves_adapters=True,
        records_experts=True,
        least_cpu_head_dim=32,
        # It refuses more, and makes less 0.01, at which the policy's logprobs would be others.
        temperatures=(0.01, 2.0),
    ),
    "transformers": Engine(
        worker="nemo_rl_lite.generation.transformers.TransformersEngine",
        package="transformers",
        kv_bytes=_transformers_cache,
    ),
}


def engine_of(config: Config) -> Engine:
    """The row of the configuration's engine."""
    return ENGINES[config.generation.backend]


def engines_sleep(config: Config) -> bool:
    """Whether this run's engines give their memory to the policy between generation phases."""
    shares = config.generation.colocated.enabled and on_gpus(config)
    return shares and engine_of(config).can_sleep and sleep_is_wanted(config)


def engines_quantize(generation: GenerationConfig) -> bool:
    """Whether engines compute with fewer bits than the weights that a refit brings."""
    return generation.vllm_kwargs.get("quantization") in VLLM_QUANTIZATIONS


def engines_serve_adapters(generation: GenerationConfig, policy: PolicyConfig) -> bool:
    """Whether refits bring the policy's LoRA adapters alone, which engines apply to weights of their own."""
    wanted = policy.megatron_cfg.peft.enabled and generation.vllm_cfg.lora == "adapters"
    return wanted and ENGINES[generation.backend].serves_adapters


def engines_share_weights(config: Config) -> bool:
    """Whether policy ranks keep the frozen weights of LoRA in the memory of the engine on their GPU: the engine applies
    the adapters itself, never gives the memory of its weights away, and may share it (`refit.direct`)."""
    shares = generates(config) and config.generation.colocated.enabled and on_gpus(config)
    serves = engines_serve_adapters(config.generation, config.policy)
    return shares and serves and config.refit.direct and not engines_sleep(config)
