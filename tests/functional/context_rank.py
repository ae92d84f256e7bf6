"""One rank of a small model whose sequences context-parallel ranks share, run by megatron-core's schedule: scores, loss
and whole gradients.

context_rank.py OUTPUT TENSOR CONTEXT. Transformer Engine's attention needs GPUs; this model's own attention gathers
keys and values of the whole row. Rank 0 writes the results of all ranks to OUTPUT.
"""

import math
import os
import sys

import torch
import torch.distributed as dist

from nemo_rl_lite.compat.megatron_cpu import prepare_import

prepare_import()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

from nemo_rl_lite.losses.batch import Batch, TokenRow  # noqa: E402
from nemo_rl_lite.losses.interface import combine_metrics, floats, masked_sum  # noqa: E402
from nemo_rl_lite.losses.supervised import SFTLoss  # noqa: E402
from nemo_rl_lite.policy.context import own_places  # noqa: E402
from nemo_rl_lite.policy.micro_batches import Layout  # noqa: E402
from nemo_rl_lite.policy.model import (  # noqa: E402
    MegatronModel,
    ParallelPlace,
    context_ranks,
    ddp_config,
)
from nemo_rl_lite.policy.passes import forward_backward, forward_scores, put_rows  # noqa: E402
from nemo_rl_lite.validation.compose import compose_config  # noqa: E402

VOCABULARY, HIDDEN, ROWS, TEMPERATURE = 32, 16, 8, 0.7


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
        keys, values = (AllParts.apply(hidden_SH @ matrix, self.context) for matrix in (self.keys, self.values))
        hidden = attention_mask[0, 0]
        # The first token that each sees begins its sequence.
        pieces = (~hidden).int().argmax(1).unique_consecutive(return_counts=True)[1].tolist()
        size = self.context.size
        of_ranks = [own_places(pieces, rank, size) if size > 1 else torch.arange(sum(pieces)) for rank in range(size)]
        seen = hidden[of_ranks[self.context.rank]][:, torch.cat(of_ranks)]
        scores = (hidden_SH @ self.queries @ keys.T).masked_fill(seen, -torch.inf)
        mixed_SH = torch.tanh(hidden_SH + scores.softmax(-1) @ values)
        return output_processor(mixed_SH[:, None], self.head, None)


def main(output: str, tensor: int, context: int) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, context_parallel_size=context)
    model, replicas = built(tensor, context), parallel_state.get_data_parallel_world_size()
    rows, loss = sampled_rows(), EntropyLoss() if tensor > 1 else ScoresLoss()
    share, counts = ROWS // replicas, loss.counts(rows)
    own = Batch.padded(rows[model.place.data_rank * share :][:share])
    layout = Layout("packed", 48, 8 * context, piece=2 * context if context > 1 else 1)
    scored = forward_scores(model, own.tokens, own.lengths, layout, TEMPERATURE, loss=loss)
    trained = forward_backward(model, own, layout, TEMPERATURE, loss, counts, mismatch_counts=counts)
    kept = torch.zeros(own.tokens.shape)
    for part in trained:
        put_rows(kept, part.rows, part.scores["logprobs"])
    metrics = combine_metrics(floats([part.metrics for part in trained]))
    gradients = {name: parameter.main_grad.clone() for name, parameter in model.chunks[0].module.named_parameters()}
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (model.place, scored | {"kept": kept}, metrics, gradients, len(trained)))
    if dist.get_rank() == 0:
        torch.save({"ranks": found, "lengths": [len(row.tokens) for row in rows], "share": share}, output)
    dist.barrier()


def built(tensor: int, context: int) -> MegatronModel:
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
    chunk = DistributedDataParallel(config, ddp_config(parallel, sharing), Small(config, context_ranks()))
    ranks = parallel_state
    place = ParallelPlace(
        ranks.get_data_parallel_rank(),
        ranks.get_data_parallel_world_size(),
        ranks.get_tensor_model_parallel_rank(),
        has_logits=True,
        is_whole=tensor == 1,
        context_rank=ranks.get_context_parallel_rank(),
    )
    device = torch.device("cpu")
    return MegatronModel(None, [chunk], place, device, half_precision=False, context=context_ranks())


def sampled_rows() -> list[TokenRow]:
    """Sequences of which few fill the chunks of ranks, and some are shorter than the number of chunks."""
    source, rows = torch.Generator().manual_seed(1), []
    for length in (2, 19, 7, 16, 3, 24, 11, 13):
        tokens = torch.randint(0, VOCABULARY, (length,), generator=source).tolist()
        rows.append(TokenRow(tokens, [place >= 1 for place in range(length)], [-2.0] * length))
    return rows


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
    os._exit(0)
