"""Settle an engine's share of a GPU that it shares with the policy, where the configuration leaves it to `auto`."""

from dataclasses import replace
from math import ceil, floor

from nemo_rl_lite.config.automatic import SHARE_COLOCATED, engine_share
from nemo_rl_lite.config.engines import engine_of, engines_sleep
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import engines, samples_per_step
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.offload.residency import Phase, Residency
from nemo_rl_lite.planning.budget import budget
from nemo_rl_lite.planning.prediction import engine_weights, token_cache_bytes

# vLLM's own working memory, which is part of its share: bytes, and copies of a step's float32 logits.
WORKING, LOGITS = 2 * 2**30, 6
_GRAIN = 100


def chooses_share(config: Config) -> bool:
    """Whether the run's engines share GPUs with the policy and their share is left to `auto`."""
    shared = Residency.of(config).engines_share_device and engine_of(config).takes_share
    return shared and config.generation.vllm_cfg.gpu_memory_utilization == "auto"


def with_first_share(config: Config, shape: ModelShape, gpu_bytes: int) -> Config:
    """`config` with the share that all sequences need, up to half of the GPU, and no less than one sequence needs."""
    if not chooses_share(config):
        return config
    longest = config.policy.max_total_sequence_length
    least, all_of_them = (_needed(config, shape, tokens) for tokens in (longest, _running(config) * longest))
    share = max(least, min(all_of_them, SHARE_COLOCATED * gpu_bytes)) / gpu_bytes
    return _with_share(config, min(1, ceil(share * _GRAIN) / _GRAIN))


def with_more_share(config: Config, shape: ModelShape, gpu_bytes: int, used: float) -> Config:
    """`config`, whose share is `with_first_share`'s, with more of it for engines that sleep while the policy works: as
    much as all sequences need and `used` of the GPU has room for."""
    if not engines_sleep(config):
        return config
    first = engine_share(config.generation)
    room = used - budget(config, shape, gpu_bytes).device[Phase.GENERATE] / gpu_bytes
    needed = _needed(config, shape, _running(config) * config.policy.max_total_sequence_length) / gpu_bytes
    most = min(first + room, needed)
    return _with_share(config, max(first, floor(most * _GRAIN) / _GRAIN))


def _running(config: Config) -> int:
    """Sequences that an engine decodes at a time."""
    return min(config.generation.vllm_cfg.max_num_seqs, -(-samples_per_step(config) // engines(config)))


def _needed(config: Config, shape: ModelShape, tokens: int) -> int:
    weights = engine_weights(config, shape)
    logits = config.generation.vllm_cfg.max_num_seqs * shape.vocabulary * 4
    return weights + WORKING + LOGITS * logits + tokens * token_cache_bytes(config, shape)


def _with_share(config: Config, share: float) -> Config:
    generation = config.generation
    settings = replace(generation.vllm_cfg, gpu_memory_utilization=share)
    return replace(config, generation=replace(generation, vllm_cfg=settings))
