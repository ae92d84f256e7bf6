"""Cascade attention by prompt: a decoding step reads the keys and values of a prompt once for all its samples.

vLLM's cascade attention has one prefix for a whole batch. Here neighboring requests whose cache begins with the same
blocks are a group, which attends to these blocks in one call. A second call attends to the rest of each request, and
`merge_attn_states` combines both. `attention_backend=CUSTOM` selects this backend. Batches with prompts, and layers
with sliding windows, sinks or ALiBi, are computed as by vLLM's FlashAttention.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from nemo_rl_lite.compat.versions import written_for

written_for(__name__, "vllm", "0.26")

# The workers of a tensor-parallel engine log what vLLM's loggers get.
log = init_logger(f"vllm.{__name__}")

# Shortest prefix, in blocks, that is worth a separate call.
MIN_BLOCKS = 8
# Rows of a group: FlashAttention 3 computes up to 64 in its smallest tile.
_ROWS = 64


class Division(NamedTuple):
    """The caches of R requests, divided into the shared prefixes of groups, R of them or fewer, and the rest."""

    starts: Tensor
    """(R + 1) First request of each group, and R for the groups that remain."""
    lengths: Tensor
    """(R) Tokens of each group's prefix."""
    table: Tensor
    """(R, blocks) Blocks of each group's first request."""
    rest_lengths: Tensor
    """(R) Tokens of each request after its prefix, at least 1."""
    rest_table: Tensor
    """(R, blocks) Their blocks."""


def group_size(queries_per_key: int) -> int:
    """Return the maximum number of requests in a group, by a model's query heads for each key head."""
    return max(1, _ROWS // queries_per_key)


def divide(table: Tensor, lengths: Tensor, block: int, most: int) -> Division:
    """Divide the caches of requests, without a wait for the device.

    Args:
        table: (R, blocks) int32, blocks of each request's cache. Entries after its last one may be anything.
        lengths: (R) int32, tokens of each request's cache, the newest included.
        block: tokens of a block.
        most: maximum number of requests in a group.
    """
    count, width = table.shape
    number = torch.arange(count, dtype=torch.int32, device=table.device)
    whole = (lengths - 1).clamp(min=0) // block
    same = (table[1:] == table[:-1]).cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
    # Blocks in common with the request before, and the most in common with either neighbor.
    common = torch.cat([whole.new_zeros(1), torch.minimum(same, torch.minimum(whole[1:], whole[:-1]))])
    after = torch.cat([common[1:], whole.new_zeros(1)])
    # Samples of two prompts share the blocks of a system prompt. They form a group only if it is most of each prompt.
    joins = (common >= MIN_BLOCKS) & (4 * common >= 3 * torch.maximum(common.roll(1), after))
    begin = torch.where(joins, 0, number).cummax(0).values
    joins &= (number - begin) % most != 0
    group = (~joins).cumsum(0) - 1
    starts = number.new_full((count + 1,), count).scatter_reduce_(0, group, number, "amin")
    unset = width + 1
    blocks = whole.new_full((count,), unset)
    blocks = blocks.scatter_reduce_(0, group, torch.where(joins, common, unset), "amin")
    blocks = torch.where(blocks == unset, 0, blocks)
    own = blocks[group]
    columns = (own[:, None] + torch.arange(width, device=table.device)).clamp(max=width - 1)
    rest_lengths = (lengths - own * block).clamp(min=1)
    first = starts[:count].clamp(max=count - 1)
    return Division(starts, blocks * block, table[first], rest_lengths, table.gather(1, columns))


class CascadeBuilder(FlashAttentionMetadataBuilder):
    """Adds a division to the metadata of decoding steps, whose other fields describe the rest of each request."""

    # A graph of prompts would not be one of decoding steps.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = False

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._applies: bool | None = None
        # CUDA graphs read from the same memory at every step.
        self._kept: Division | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        given = common_attn_metadata
        if self._applies is None:
            # The layers do not exist before.
            self._applies = self._is_plain()
            how = "" if self._applies else "do not "
            log.info("decoding steps %suse cascade attention by prompt", how)
        is_decoding = given.max_query_len == 1 and given.num_actual_tokens >= given.num_reqs
        if not is_decoding or given.causal is not True or not self._applies:
            return super().build(common_prefix_len, given, fast_build)
        table, lengths = given.block_table_tensor[: given.num_reqs], given.seq_lens[: given.num_reqs]
        found = divide(table, lengths, self.block_size, group_size(self.num_heads_q // self.num_heads_kv))
        if self._kept is None:
            self._kept = self._allocated(table)
        division = Division(*(kept[: len(new)].copy_(new) for kept, new in zip(self._kept, found, strict=True)))
        own = given.replace(block_table_tensor=division.rest_table, seq_lens=division.rest_lengths)
        made: Any = super().build(0, own, fast_build)
        made.division = division
        return made

    def use_cascade_attention(self, *arguments: Any, **named: Any) -> bool:
        return False

    def _is_plain(self) -> bool:
        """Return whether all layers attend to all tokens."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        impls: list[Any] = [layer.impl for layer in layers.values()]
        return (
            self.dcp_world_size == 1
            and self.rswa_window is None
            and all(
                one.sliding_window == (-1, -1)
                and one.alibi_slopes is None
                and one.sinks is None
                and not one.kv_cache_dtype.startswith("fp8")
                for one in impls
            )
        )

    def _allocated(self, table: Tensor) -> Division:
        """Return memory for the largest batch."""
        most, width = max(self.vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0), table.shape[1]
        return Division(*(table.new_zeros(shape) for shape in (most + 1, most, (most, width), most, (most, width))))


class CascadeImpl(FlashAttentionImpl):
    """Attends to prefixes and to the rest, where the metadata has a division."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        division: Division | None = getattr(attn_metadata, "division", None)
        if division is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        count = attn_metadata.num_actual_tokens
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        shared: dict[str, Any] = {
            "q": query[:count],
            "k": canonicalize_singleton_dim_strides(keys),
            "v": canonicalize_singleton_dim_strides(values),
            "max_seqlen_k": attn_metadata.max_seq_len,
            "softmax_scale": self.scale,
            "window_size": [-1, -1],
            "softcap": self.logits_soft_cap,
            "return_softmax_lse": True,
            "fa_version": self.vllm_flash_attn_version,
            "num_splits": attn_metadata.max_num_splits,
        }
        of_prefix = fa_utils.flash_attn_varlen_func(
            cu_seqlens_q=division.starts,
            max_seqlen_q=group_size(self.num_queries_per_kv),
            seqused_k=division.lengths,
            block_table=division.table,
            causal=False,
            **shared,
        )
        of_rest = fa_utils.flash_attn_varlen_func(
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=1,
            seqused_k=division.rest_lengths,
            block_table=division.rest_table,
            causal=True,
            scheduler_metadata=attn_metadata.scheduler_metadata,
            **shared,
        )
        merge_attn_states(output[:count], *of_prefix, *of_rest)
        return output


class CascadeBackend(FlashAttentionBackend):
    """FlashAttention with cascade attention by prompt."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return CascadeImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return CascadeBuilder
