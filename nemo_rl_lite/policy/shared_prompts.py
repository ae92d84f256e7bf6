"""Shared prompts: rows of a pack that begin with the same tokens compute these once.

A family is a run of neighbouring rows with a common prefix, such as the responses to a prompt. A pack has the prefix
once, and then the rest of each row. Causal attention gives the prefix the same hidden states in each row, so all layers
but attention run over these tokens only. A row's attention reads keys and values of the prefix and of the row's rest.

The last common token is part of each rest: its logits are those of the first token in which rows differ.

Shapes: N tokens of a pack, K keys, of which a prefix has one copy for itself and one for each of its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.config.schema import PolicyConfig
from nemo_rl_lite.errors import TrainingError

KEY = "policy.sequence_packing.shared_prompts"


@dataclass(frozen=True)
class Family:
    """Neighbouring rows of a batch with the same first `prefix` tokens."""

    rows: range
    prefix: int = 0

    def tokens(self, lengths: Sequence[int]) -> int:
        """Return the tokens of the prefix and of the rows' rests. `lengths`: tokens of each row of the batch."""
        return self.prefix + sum(lengths[row] - self.prefix for row in self.rows)

    def split(self, count: int, together: int) -> "list[Family]":
        """Split the rows into `count` parts of similar size, each with the prefix. Units of `together` rows stay
        together."""
        units, start = len(self.rows) // together, self.rows.start
        bounds = [start + units * part // count * together for part in range(count + 1)]
        return [Family(range(*own), self.prefix if len(range(*own)) > 1 else 0) for own in pairwise(bounds)]


def families_of(tokens_BT: Tensor, lengths: Sequence[int], together: int, least: float) -> list[Family]:
    """Return the families that save the maximum number of tokens, in order. Units of `together` rows stay together.

    Each unit is a family without a prefix if the share of saved tokens would not exceed `least`.
    """
    count, common = len(lengths), _common(tokens_BT.numpy(), np.asarray(lengths))
    saved, begins = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    prefixes = np.zeros(count + 1, np.int64)
    for end in range(together, count + 1, together):
        begin = np.arange(end - together, -1, -together)
        prefix = np.concatenate([[0], np.minimum.accumulate(common[: end - 1][::-1])])[end - 1 - begin]
        total = saved[begin] + prefix * (end - 1 - begin)
        best = total.argmax()
        saved[end], begins[end], prefixes[end] = total[best], begin[best], prefix[best]
    if saved[count] <= least * sum(lengths):
        return [Family(range(start, start + together)) for start in range(0, count, together)]
    found, end = [], count
    while end:
        found.append(Family(range(begins[end], end), int(prefixes[end])))
        end = int(begins[end])
    return found[::-1]


def parts_of(
    families: Sequence[Family], lengths: Sequence[int], limit: int, together: int, at_least: int
) -> list[Family]:
    """Split families into parts of at most `limit` tokens, and into `at_least` parts if they have that many units."""
    parts: list[Family] = []
    for family in families:
        units = len(family.rows) // together
        for count in range(1, units + 1):
            own = family.split(count, together)
            if count == units or max(part.tokens(lengths) for part in own) <= limit:
                parts += own
                break
    while len(parts) < at_least:
        place = max(range(len(parts)), key=lambda index: len(parts[index].rows))
        if len(parts[place].rows) == together:
            break
        parts[place : place + 1] = parts[place].split(2, together)
    return parts


def _common(tokens_BT: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the number of common first tokens of each row and the next one, minus 1, at least 0, [B - 1]."""
    differs = np.pad(tokens_BT[1:] != tokens_BT[:-1], ((0, 0), (0, 1)), constant_values=True)
    return np.maximum(np.minimum(differs.argmax(1), np.minimum(lengths[1:], lengths[:-1])) - 1, 0)


class _Mask(Enum):
    """Transformer Engine's mask in which a sequence's last query sees its last key; megatron-core does not name it."""

    padding_causal_bottom_right = auto()


@dataclass(eq=False)
class SharedKeys:
    """Keys of a pack with shared prefixes. Attention gets it as `packed_seq_params`.

    `qkv_format` is that of an unpacked row, for which megatron-core expects one rotary embedding per token.
    """

    positions_N: Tensor
    """Place of each token in its row."""
    keys_K: Tensor
    """Token of each key."""
    max_seqlen_q: int
    max_seqlen_kv: int
    boundaries: Tensor | None = None
    """Cumulative numbers of tokens and of keys of each piece, int32, for Transformer Engine. CPUs read a mask."""
    key_boundaries: Tensor | None = None
    qkv_format: str = "sbhd"
    cp_group: None = None
    tokens_per_sample: None = None
    _rotary: Tensor | None = None
    _copies: tuple[Tensor, Tensor] | None = None

    def rotary(self, of_positions: Tensor) -> Tensor:
        """Return the rotary embedding of each token, [N, 1, 1, d], from that of each position; the layers share it."""
        if self._rotary is None:
            self._rotary = of_positions.index_select(0, self.positions_N)
        return self._rotary

    def copies(self) -> tuple[Tensor, Tensor]:
        """Return the keys of each token, [K] in the order of tokens, and where each token's begin, [N + 1]."""
        if self._copies is None:
            of_tokens, order_K = self.keys_K.sort(stable=True)
            tokens = torch.arange(len(self.positions_N) + 1, device=of_tokens.device)
            self._copies = order_K, torch.searchsorted(of_tokens, tokens)
        return self._copies


def install(chunks: Sequence[Any], policy: PolicyConfig, device: torch.device) -> bool:
    """Let the attention of a model read shared prefixes. Returns whether it does, which is the same on all ranks.

    Collective. Raises TrainingError: the model does not support it, but the configuration requires it.
    """
    from megatron.core.transformer.attention import SelfAttention

    reason = next(filter(None, (_obstacle(chunk, policy) for chunk in chunks)), None)
    agreed = torch.tensor(reason is None, dtype=torch.int32, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    if not agreed:
        if policy.sequence_packing.shared_prompts is True:
            raise TrainingError(f"{KEY}: {reason or 'another pipeline stage does not support it'}; set {KEY}=auto")
        return False
    for attention in (one for chunk in chunks for one in chunk.modules() if isinstance(one, SelfAttention)):
        attention.register_forward_pre_hook(_rotate_by_position, with_kwargs=True)
        attention.core_attention.forward = partial(_attend, attention.core_attention.forward)
    return True


def _obstacle(chunk: Any, policy: PolicyConfig) -> str | None:
    """Return why a model chunk cannot share prefixes, or None."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.utils import unwrap_model

    model: Any = unwrap_model(chunk)
    settings, options = model.config, policy.megatron_cfg
    layers = getattr(getattr(model, "decoder", None), "layers", ())
    if getattr(model, "position_embedding_type", None) != "rope":
        return "this model's position embeddings are not plain rotary ones"
    if any(type(getattr(layer, "self_attention", None)) is not SelfAttention for layer in layers):
        return "this model has layers without standard attention"
    if settings.window_size is not None or settings.softmax_type != "vanilla":
        return "this model has sliding-window attention or attention sinks"
    if settings.attention_dropout:
        return f"this model has attention dropout ({settings.attention_dropout:g})"
    if settings.num_moe_experts and options.moe_router_bias_update_rate:
        return "policy.megatron_cfg.moe_router_bias_update_rate counts the tokens of each row"
    if options.fine_grained_activation_offloading:
        return "policy.megatron_cfg.fine_grained_activation_offloading moves keys that prompts share"
    return None


def _rotate_by_position(_: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Give an attention layer the rotary embedding of each token, [N, 1, 1, d], instead of each position."""
    shared, embedding = options.get("packed_seq_params"), options.get("rotary_pos_emb")
    if not isinstance(shared, SharedKeys) or embedding is None:
        return None
    return arguments, options | {"rotary_pos_emb": shared.rotary(embedding)}


def _attend(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_seq_params: Any = None,
    **options: Any,
) -> Tensor:
    """Call megatron-core's attention `attend`, with copies of the keys and values of shared prefixes.

    With `SharedKeys`, queries, keys and values are [N, 1, heads, d], and the result is [N, 1, heads * d].
    """
    if not isinstance(packed_seq_params, SharedKeys):
        return attend(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **options)
    shared = packed_seq_params
    # Values may be a view of a projection's whole result, which would stay with them and is copied more slowly.
    dense = [one.contiguous() for one in (key, value)]
    whole = [one.detach() for one in dense]
    copies = [_Copied.apply(one, shared) for one in dense]
    with torch.autograd.graph.saved_tensors_hooks(*_copied_again(whole, copies, shared.keys_K)):
        if shared.boundaries is None:
            return attend(query, *copies, attention_mask, **options)
        from megatron.core.packed_seq_params import PackedSeqParams

        pieces = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=shared.boundaries,
            cu_seqlens_kv=shared.key_boundaries,  # pyrefly: ignore  # both or neither
            max_seqlen_q=shared.max_seqlen_q,
            max_seqlen_kv=shared.max_seqlen_kv,
            pad_between_seqs=False,
        )
        options |= {"attn_mask_type": _Mask.padding_causal_bottom_right, "packed_seq_params": pieces}
        rows = (one.squeeze(1) for one in (query, *copies))
        return attend(*rows, attention_mask, **options).flatten(1).unsqueeze(1)


class _Copied(torch.autograd.Function):
    """(keys or values [N, ...], `SharedKeys`) -> [K, ...]. Adds gradients of copies in float32, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shared: SharedKeys) -> Tensor:
        ctx.shared = shared
        return whole.index_select(0, shared.keys_K)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (gradient_K,), (order_K, begins) = gradients, ctx.shared.copies()
        return _added(gradient_K.flatten(1), order_K, begins).view(-1, *gradient_K.shape[1:]), None


def _added(gradient_KW: Tensor, order_K: Tensor, begins: Tensor) -> Tensor:
    """See `shared_prompts_kernel.add_rows`."""
    if gradient_KW.is_cuda:
        from nemo_rl_lite.policy.shared_prompts_kernel import add_rows

        return add_rows(gradient_KW, order_K, begins)
    return torch.nn.functional.embedding_bag(order_K, gradient_KW, begins, mode="sum", include_last_offset=True)


def _copied_again(
    whole: Sequence[Tensor], copies: Sequence[Tensor], index_K: Tensor
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return hooks for saved tensors that keep `whole` instead of its `copies`, and copy again in the backward pass.

    Saved tensors hold both hooks, so neither refers to `copies`.
    """
    places = {one.data_ptr(): (place, one.numel()) for place, one in enumerate(copies)}

    def kept(tensor: Tensor) -> Any:
        place, count = places.get(tensor.data_ptr(), (None, None))
        return (place, tensor.shape) if tensor.is_contiguous() and tensor.numel() == count else tensor

    def restored(own: Any) -> Tensor:
        return own if isinstance(own, Tensor) else whole[own[0]].index_select(0, index_K).view(own[1])

    return kept, restored
