"""One rank of a small model whose sequences context-parallel ranks share, run by megatron-core's schedule: scores, loss
and whole gradients.

context_rank.py OUTPUT TENSOR CONTEXT. Transformer Engine's attention needs GPUs; this model's own attention gathers
keys and values of the whole row, unless this rank has the whole micro-batch. Rank 0 writes the results of all ranks to
OUTPUT, by case.
"""

import math
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist

from nemo_rl_lite.compat.megatron_cpu import prepare_import

prepare_import()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402

from nemo_rl_lite.losses.batch import Batch, TokenRow  # noqa: E402
from nemo_rl_lite.losses.interface import combine_metrics, floats, masked_sum  # noqa: E402
from nemo_rl_lite.losses.supervised import SFTLoss  # noqa: E402
from nemo_rl_lite.policy.context import ContextRanks, Shard, follow_groups, own_places  # noqa: E402
from nemo_rl_lite.policy.interface import ParallelPlace  # noqa: E402
from nemo_rl_lite.policy.micro_batches import Layout  # noqa: E402
from nemo_rl_lite.policy.model import (  # noqa: E402
    MegatronModel,
    context_ranks,
    ddp_config,
)
from nemo_rl_lite.policy.passes import cut_batch, forward, forward_backward, forward_scores, put_rows, view_of  # noqa: E402
from nemo_rl_lite.validation.compose import compose_config  # noqa: E402

VOCABULARY, HIDDEN, TEMPERATURE = 32, 16, 0.7
# Tokens of a packed row.
LIMIT = 48
# Lengths of the sequences. In `all shared`, all ranks share all of them. Few fill the chunks of ranks, and some are
# shorter than the number of chunks.
SHARED = "all shared"
CASES = {
    SHARED: (2, 19, 7, 16, 3, 24, 11, 13),
    "both kinds": (2, 19, 7, 48, 3, 36, 11, 13),
    "all short": (2, 11, 7, 12, 3, 9, 11, 10, 4, 2, 6, 3),
    "all long": (40, 33, 48, 29),
    "fewer than ranks": (7, 48),
    "one": (19,),
}


class ScoresLoss(SFTLoss):
    """Everything that a loss can ask for has a gradient."""

    needs, topk = frozenset({"entropy", "topk_logits"}), 3

    def __call__(self, logprobs_BT, batch, counts):
        total, metrics = super().__call__(logprobs_BT, batch, counts)
        entropy_BT, top_BTk, ids_BTk = batch.require("entropy", "topk_logits", "topk_ids")
        chosen = masked_sum(entropy_BT, batch.mask) + masked_sum((top_BTk * (ids_BTk % 5)).sum(-1), batch.mask)
        total = total - 0.3 * chosen / counts.tokens
        return total, metrics | {"loss": total.detach().clone()}


class EntropyLoss(ScoresLoss):
    """The same without the largest logits, which tensor parallelism splits."""

    needs = frozenset({"entropy"})

    def __call__(self, logprobs_BT, batch, counts):
        total, metrics = SFTLoss.__call__(self, logprobs_BT, batch, counts)
        total = total - 0.3 * masked_sum(batch.require("entropy")[0], batch.mask) / counts.tokens
        return total, metrics | {"loss": total.detach().clone()}


class AllParts(torch.autograd.Function):
    """Values of this rank -> of all ranks in turn; in the backward pass the sum of all ranks' gradients of its own."""

    @staticmethod
    def forward(ctx, own, context):
        ctx.context = context
        parts = [torch.empty_like(own) for _ in range(context.size)]
        dist.all_gather(parts, own.contiguous(), context.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=ctx.context.group)
        return summed.chunk(ctx.context.size)[ctx.context.rank], None


class Small(MegatronModule):
    """Embeddings of tokens and positions, causal attention within each sequence, and an output layer."""

    def __init__(self, config, context):
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        source = torch.Generator().manual_seed(5)
        drawn = lambda *shape: torch.nn.Parameter(torch.randn(shape, generator=source) / math.sqrt(shape[-1]))  # noqa: E731
        self.tokens, self.places = drawn(VOCABULARY, HIDDEN), drawn(64, HIDDEN)
        self.queries, self.keys, self.values = drawn(HIDDEN, HIDDEN), drawn(HIDDEN, HIDDEN), drawn(HIDDEN, HIDDEN)
        head, self.context = drawn(VOCABULARY, HIDDEN), context
        self.head = ColumnParallelLinear(
            HIDDEN,
            VOCABULARY,
            config=config,
            init_method=torch.nn.init.zeros_,
            bias=False,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        rank, size = parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size
        self.head.weight.data.copy_(head.data.chunk(size)[rank])

    def set_input_tensor(self, tensor):
        """Take a tensor of the previous pipeline stage, of which there is none."""

    def forward(self, tokens_nS, positions_nS, attention_mask, output_processor):
        hidden_SH = self.tokens[tokens_nS[0]] + self.places[positions_nS[0]]
        hidden = attention_mask[0, 0]
        context = self.context if len(hidden) > len(hidden_SH) else ContextRanks()
        keys, values = (
            AllParts.apply(hidden_SH @ matrix, context) if context.splits else hidden_SH @ matrix
            for matrix in (self.keys, self.values)
        )
        # The first token that each sees begins its sequence.
        pieces = (~hidden).int().argmax(1).unique_consecutive(return_counts=True)[1].tolist()
        size = context.size
        of_ranks = [own_places(pieces, rank, size) if size > 1 else torch.arange(sum(pieces)) for rank in range(size)]
        seen = hidden[of_ranks[context.rank]][:, torch.cat(of_ranks)]
        scores = (hidden_SH @ self.queries @ keys.T).masked_fill(seen, -torch.inf)
        mixed_SH = torch.tanh(hidden_SH + scores.softmax(-1) @ values)
        return output_processor(mixed_SH[:, None], self.head, None)


def main(output: str, tensor: int, context: int) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, context_parallel_size=context)
    replicas, found = parallel_state.get_data_parallel_world_size(), {}
    for case, lengths in CASES.items():
        if len(lengths) >= replicas:
            found[case] = passes(tensor, context, sampled_rows(lengths), hybrid=case != SHARED)
    if dist.get_rank() == 0:
        torch.save(found, output)
    dist.barrier()


def passes(tensor: int, context: int, rows: list[TokenRow], hybrid: bool) -> list[tuple]:
    """The results of all ranks."""
    model, loss = built(tensor, context, hybrid), EntropyLoss() if tensor > 1 else ScoresLoss()
    share, counts = len(rows) // model.place.data_size, loss.counts(rows)
    own = Batch.padded(rows[model.place.data_rank * share :][:share])
    layout = Layout("packed", LIMIT, 8 * context, piece=2 * context if context > 1 else 1)
    if model.context.by_length:
        layout = replace(layout, whole=Layout("packed", LIMIT // context, 8))
    scored = forward_scores(model, own.tokens, own.lengths, layout, TEMPERATURE, loss=loss)
    trained = forward_backward(model, own, layout, TEMPERATURE, loss, counts, mismatch_counts=counts)
    kept = torch.zeros(own.tokens.shape)
    for part in trained:
        put_rows(kept, part.rows, part.scores["logprobs"])
    scored |= {"kept": kept, "queries": rotated(model, own, layout)}
    metrics = combine_metrics(floats([part.metrics for part in trained]))
    gradients = {name: parameter.main_grad.clone() for name, parameter in model.chunks[0].module.named_parameters()}
    packs = [
        (micro.piece > 1, micro.is_filler, micro.rows.tolist())
        for micro in cut_batch(model, own.tokens, own.lengths, layout)
    ]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (model.place, scored, metrics, gradients, packs))
    return found


def rotated(model: MegatronModel, batch: Batch, layout: Layout) -> torch.Tensor:
    """The queries of all tokens, [B, T, width], that megatron-core's attention gives to Transformer Engine."""
    torch.manual_seed(3)
    config, of_tokens = model.chunks[0].config, 10 * torch.randn(VOCABULARY, HIDDEN)
    spec = get_gpt_layer_local_spec().submodules.self_attention
    spec.submodules.core_attention = Queries
    attention = build_module(spec, config=config, layer_number=1)
    if model.context.by_length:
        decoder = SimpleNamespace(layers=[SimpleNamespace(self_attention=attention)])
        follow_groups([SimpleNamespace(decoder=decoder, position_embedding_type="rope")])
    embedding = RotaryEmbedding(config.kv_channels, 1.0, use_cpu_initialization=True)

    def chunk(tokens_nS, positions, packed_seq_params, **_):
        angles = embedding(packed_seq_params.max_seqlen_q, packed_seq=True)
        attention(of_tokens[tokens_nS[0]][:, None], None, rotary_pos_emb=angles, packed_seq_params=packed_seq_params)
        return attention.core_attention.seen.flatten(1)

    found = torch.zeros(*batch.tokens.shape, HIDDEN // config.tensor_model_parallel_size)
    for micro in cut_batch(model, batch.tokens, batch.lengths, layout):
        shard = Shard.of(micro, model.context.of(micro), model.device)
        # As on a GPU, which gets boundaries instead of a mask.
        seen = view_of(micro, torch.device("cuda"), shard.context)
        queries = shard.unpack(forward(model, chunk, shard, seen, micro.longest, None))
        if model.context.reports(micro):
            put_rows(found, micro.rows, queries.detach())
    model.context.complete(found, model.device)
    return found


class Queries(torch.nn.Module):
    """Keeps the queries, in place of attention."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, *_, **options):
        self.seen = query
        return query


def built(tensor: int, context: int, hybrid: bool) -> MegatronModel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=tensor,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        finalize_model_grads_func=finalize_model_grads,
    )
    parallel = compose_config(["policy.megatron_cfg.optimizer.use_distributed_optimizer=false"]).policy.megatron_cfg
    sharing = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    own, ranks = context_ranks(hybrid), parallel_state
    chunk = DistributedDataParallel(config, ddp_config(parallel, sharing), Small(config, own))
    place = ParallelPlace(
        ranks.get_data_parallel_rank(),
        ranks.get_data_parallel_world_size(),
        ranks.get_tensor_model_parallel_rank(),
        has_logits=True,
        is_whole=tensor == 1,
        context_rank=ranks.get_context_parallel_rank(),
    )
    device = torch.device("cpu")
    return MegatronModel(None, [chunk], place, device, half_precision=False, context=own)


def sampled_rows(lengths: tuple[int, ...]) -> list[TokenRow]:
    source, rows = torch.Generator().manual_seed(1), []
    for length in lengths:
        tokens = torch.randint(0, VOCABULARY, (length,), generator=source).tolist()
        rows.append(TokenRow(tokens, [place >= 1 for place in range(length)], [-2.0] * length))
    return rows


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
    os._exit(0)
