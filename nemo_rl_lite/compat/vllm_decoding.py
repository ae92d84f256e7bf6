"""Decoding steps with the launcher's kernels: attention of batches with one new token per request, and samples.

vLLM's FlashAttention computes all other batches, and layers with sliding windows, sinks, ALiBi, soft caps or FP8
caches. An explicit `attention_backend` keeps vLLM's attention.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.versions import KERNEL_HEAD_SIZES, KERNEL_RELEASE, fits, written_for

written_for(__name__, "vllm", "0.26")

# See `attention_kernel.py` and `sampling_kernel.py` of generation/vllm.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor], None]
Sample = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

# Environment variable from an engine's process to those of its ranks: "1" if the launcher's attention applies.
_ATTENTION = "NRL_DECODE_ATTENTION"
# Attribute of a builder: the result of `all_plain`.
_ALL_PLAIN = "nemo_rl_lite_all_plain"
# Attribute of a batch: its attention metadata, which no graph reads.
_METADATA = "nemo_rl_lite_metadata"
# Compute capability, in tenths, of the GPUs on which the kernels were measured.
_HOPPER = 90


def allow_own_attention(is_allowed: bool) -> None:
    """Tell the ranks of this process's engine whether they may use the launcher's attention. A process has one engine,
    since its ranks' patches stay."""
    os.environ[_ATTENTION] = "1" if is_allowed else "0"


def takes_kernels() -> bool:
    """Return whether this rank's GPU and release of vLLM have decoding steps that the launcher's kernels fit."""
    from vllm.platforms import current_platform

    on_hopper = current_platform.is_cuda() and current_platform.is_device_capability_family(_HOPPER)
    return on_hopper and fits("vllm", KERNEL_RELEASE)


def replace_decoding(attend: Attend, sample: Sample) -> None:
    """Replace vLLM's samples of decoding steps, and its attention unless a backend was chosen. Each rank calls this."""
    replace_samples(sample)
    if os.environ.get(_ATTENTION) == "1":
        replace_attention(attend)
        keep_metadata()


def replace_attention(attend: Attend) -> None:
    """Make FlashAttention's layers compute decoding steps by the kernel."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder

    layers: Any = FlashAttentionImpl
    builders: Any = FlashAttentionMetadataBuilder
    forward, build = layers.forward, builders.build

    def forward_or_decode(
        self: Any,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **named: Any,
    ) -> Tensor:
        decodes = attn_metadata is not None and is_decoding(attn_metadata) and is_plain(self)
        if not decodes or query.stride()[1:] != (self.head_size, 1):
            return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales, **named)
        count = attn_metadata.num_actual_tokens
        attend(query[:count], kv_cache, attn_metadata.block_table, attn_metadata.seq_lens, self.scale, output[:count])
        return output

    def build_for_both(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        # FlashAttention's schedule for the step would not be read.
        unread = common_attn_metadata.max_query_len == 1 and all_plain(self)
        return build(self, common_prefix_len, common_attn_metadata, fast_build or unread)

    layers.forward, builders.build = forward_or_decode, build_for_both
    # FlashAttention's graphs of decoding steps also compute prompts; these do not.
    builders._cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


def keep_metadata() -> None:
    """Make a batch that the runner repeats (`vllm_batches.py`) keep its attention metadata.

    The launcher's attention must compute all layers: its graphs read only lengths and block tables.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    states: Any = DefaultModelState
    prepare = states.prepare_attn

    def prepare_once(
        self: Any, batch: Any, mode: Any, tables: Any, slots: Any, groups: Any, *args: Any, **named: Any
    ) -> Any:
        if (kept := getattr(batch, _METADATA, None)) is not None:
            return kept
        metadata = prepare(self, batch, mode, tables, slots, groups, *args, **named)
        if mode is CUDAGraphMode.FULL and all(
            is_unread(group.get_metadata_builder()) for kind in groups for group in kind
        ):
            setattr(batch, _METADATA, metadata)
        return metadata

    states.prepare_attn = prepare_once


def is_unread(builder: Any) -> bool:
    """Return whether graphs of decoding steps read none of a builder's metadata."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    return type(builder) is FlashAttentionMetadataBuilder and all_plain(builder)


def is_decoding(metadata: Any) -> bool:
    """Return whether each request of a batch has one new token, which attends to its whole cache."""
    return (
        metadata.max_query_len == 1
        and metadata.num_actual_tokens == len(metadata.seq_lens)
        and metadata.causal is True
        and not metadata.use_cascade
        and metadata.mm_prefix_range_tensor is None
        and metadata.rswa_prefix_lens is None
    )


def is_plain(layer: Any) -> bool:
    """Return whether the kernel computes what this `FlashAttentionImpl` computes."""
    from vllm.v1.attention.backend import AttentionType

    return (
        layer.attn_type == AttentionType.DECODER
        and layer.head_size in KERNEL_HEAD_SIZES
        and layer.sliding_window == (-1, -1)
        and layer.alibi_slopes is None
        and layer.sinks is None
        and not layer.logits_soft_cap
        and not layer.kv_cache_dtype.startswith("fp8")
        and layer.dcp_world_size == 1
        and not layer.batch_invariant_enabled
    )


def all_plain(builder: Any) -> bool:
    """Return whether the kernel computes all layers of a `FlashAttentionMetadataBuilder`."""
    found: bool | None = getattr(builder, _ALL_PLAIN, None)
    if found is None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names)
        found = all(is_plain(layer.impl) for layer in layers.values())
        setattr(builder, _ALL_PLAIN, found)
    return found


def replace_samples(sample: Sample) -> None:
    """Make runner V2 draw tokens by the kernel, which also computes their logprobs."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler

    module: Any = sampler
    draw, score = module.gumbel_sample, module.compute_topk_scores
    # Logits, tokens and logprobs of the last call.
    last: list[Any] = [None, None, None]

    def draw_and_score(
        logits: Tensor,
        states: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        use_fp64: bool = False,
        **named: Any,
    ) -> Tensor:
        if use_fp64:
            return draw(logits, states, temperatures, seeds, positions, use_fp64=True, **named)
        tokens, logprobs = sample(logits, states, temperatures, seeds, positions)
        last[:] = logits.data_ptr(), tokens, logprobs
        return tokens

    def known_scores(
        logits: Tensor, count: int, tokens: Tensor, ends: Any = None, *, logits_mode: bool = False, **named: Any
    ) -> Any:
        drawn_from, drawn, logprobs = last
        others = count or named.get("max_per_req_token_ids") or logits_mode
        if others or drawn is not tokens or drawn_from != logits.data_ptr():
            return score(logits, count, tokens, ends, logits_mode=logits_mode, **named)
        # Ranks of tokens, which nothing reads, would need another pass over the logits.
        return LogprobsTensors(tokens[:, None], logprobs[:, None], torch.zeros_like(tokens), ends)

    module.gumbel_sample, module.compute_topk_scores = draw_and_score, known_scores
