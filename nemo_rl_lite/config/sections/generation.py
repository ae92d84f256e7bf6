"""The engines: sampling, GPUs, the endpoint; and the refits that bring them weights."""

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.sections.types import (
    STRICT,
    ActiveIf,
    Auto,
    Fraction,
    NonNegativeInt,
    NullIsEmpty,
    PositiveFloat,
    PositiveInt,
    Seconds,
)


@dataclass(frozen=True, config=STRICT)
class VLLMConfig:
    tensor_parallel_size: PositiveInt
    enforce_eager: Annotated[bool, ActiveIf("generation.backend", "vllm"), ActiveIf("GPUs")]
    max_num_seqs: PositiveInt
    gpu_memory_utilization: Annotated[Fraction | Auto, ActiveIf("generation.backend", "vllm"), ActiveIf("GPUs")]
    cpu_kv_cache_gib: Annotated[PositiveInt, ActiveIf("generation.backend", "vllm"), ActiveIf("CPUs")]
    recompute_kv_cache_after_weight_updates: Annotated[
        bool,
        ActiveIf("generation.backend", "vllm"),
        ActiveIf("algorithm.rollouts.in_flight_weight_updates"),
        ActiveIf("algorithm.rollouts.source", "queue"),
    ]
    lora: Annotated[
        Literal["merged", "adapters"],
        ActiveIf("generation.backend", "vllm"),
        ActiveIf("policy.megatron_cfg.peft.enabled"),
    ]


@dataclass(frozen=True, config=STRICT)
class GenerationResources:
    num_nodes: PositiveInt | None
    gpus_per_node: PositiveInt | None


@dataclass(frozen=True, config=STRICT)
class ColocationConfig:
    enabled: bool
    sleep: Annotated[bool | Auto, ActiveIf(".enabled"), ActiveIf("generation.backend", "vllm"), ActiveIf("GPUs")]
    resources: Annotated[GenerationResources, ActiveIf(".enabled", False), ActiveIf("GPUs")]


@dataclass(frozen=True, config=STRICT)
class ServeConfig:
    enabled: bool
    host: Annotated[str, Field(min_length=1), ActiveIf("an endpoint")]
    port: Annotated[Annotated[int, Field(gt=0, lt=2**16)] | None, ActiveIf("an endpoint")]


@dataclass(frozen=True, config=STRICT)
class GenerationConfig:
    backend: Literal["vllm", "transformers"]
    colocated: ColocationConfig
    data_parallel_size: PositiveInt | None
    max_new_tokens: PositiveInt
    temperature: PositiveFloat
    top_p: Fraction
    top_k: PositiveInt | None
    stop_token_ids: Annotated[list[NonNegativeInt], NullIsEmpty]
    stop_strings: Annotated[list[str], NullIsEmpty]
    serve: ServeConfig
    vllm_cfg: VLLMConfig
    vllm_kwargs: Annotated[dict[str, Any], ActiveIf("generation.backend", "vllm")]


@dataclass(frozen=True, config=STRICT)
class RefitConfig:
    buffer_memory_ratio: Annotated[Fraction, ActiveIf(".bucket_bytes", None)]
    bucket_bytes: PositiveInt | None
    num_buffers: Annotated[int, Field(ge=1, le=8), ActiveIf("generation.colocated.enabled", False)]
    direct: Annotated[bool, ActiveIf("generation.colocated.enabled"), ActiveIf("GPUs")]
    verify: Literal["off", "sample", "full"]
    timeout_s: Seconds
