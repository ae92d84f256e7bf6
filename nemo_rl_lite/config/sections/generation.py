"""The engines: sampling, GPUs, the endpoint; and the refits that bring them weights."""

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.sections.types import (
    STRICT,
    Auto,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
)


@dataclass(frozen=True, config=STRICT)
class VLLMConfig:
    tensor_parallel_size: PositiveInt
    enforce_eager: bool
    max_num_seqs: PositiveInt
    gpu_memory_utilization: Fraction | Auto
    cpu_kv_cache_gib: PositiveInt
    recompute_kv_cache_after_weight_updates: bool
    lora: Literal["merged", "adapters"]


@dataclass(frozen=True, config=STRICT)
class GenerationResources:
    num_nodes: PositiveInt | None
    gpus_per_node: PositiveInt | None


@dataclass(frozen=True, config=STRICT)
class ColocationConfig:
    enabled: bool
    sleep: bool | Auto
    resources: GenerationResources


@dataclass(frozen=True, config=STRICT)
class ServeConfig:
    enabled: bool
    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(gt=0, lt=2**16)] | None


@dataclass(frozen=True, config=STRICT)
class GenerationConfig:
    backend: Literal["vllm", "transformers"]
    colocated: ColocationConfig
    data_parallel_size: PositiveInt | None
    max_new_tokens: PositiveInt
    temperature: PositiveFloat
    top_p: Fraction
    top_k: PositiveInt | None
    stop_token_ids: list[NonNegativeInt]
    stop_strings: list[str] | None
    serve: ServeConfig
    vllm_cfg: VLLMConfig
    vllm_kwargs: dict[str, Any]


@dataclass(frozen=True, config=STRICT)
class RefitConfig:
    buffer_memory_ratio: Fraction
    bucket_bytes: PositiveInt | None
    num_buffers: Annotated[int, Field(ge=1, le=8)]
    direct: bool
    verify: Literal["off", "sample", "full"]
    timeout_s: Seconds
