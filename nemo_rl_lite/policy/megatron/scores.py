"""What a loss reads of the logits of a micro-batch: logprobs, entropy, the largest logits.

Shapes: N positions of the model's input, v entries of the vocabulary on this tensor-parallel rank, b sequences of T
tokens. All values are float32 and, outside `no_grad`, carry a gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.config.sizes import LOGPROB_CHUNK
from nemo_rl_lite.losses.interface import Loss, needs_of
from nemo_rl_lite.policy.megatron.micro_batches import ModelInput


def token_logprobs(logits_nSv: Tensor, micro: ModelInput, temperature: float) -> Tensor:
    """Logprobs [b, T] of the micro-batch's tokens from this rank's vocabulary slice of the logits."""
    next_N = micro.tokens_nS.roll(-1, dims=1).flatten()
    return micro.unpack(_by_chunk(_next_token_logprobs, temperature, logits_nSv.flatten(0, 1), next_N))


def needed_scores(logits_nSv: Tensor, micro: ModelInput, temperature: float, loss: Loss) -> dict[str, Tensor]:
    """What `loss` needs besides logprobs, under the names of `Batch`'s fields."""
    needs, logits_Nv, found = needs_of(loss), logits_nSv.flatten(0, 1), {}
    if "entropy" in needs:
        found["entropy"] = micro.unpack(_by_chunk(_entropy, temperature, logits_Nv))
    if "topk_logits" in needs:
        top_Nk, ids_Nk = _largest(logits_Nv, loss.topk)  # pyrefly: ignore  # a loss with this need has it
        found |= {"topk_logits": micro.unpack(top_Nk.float() / temperature), "topk_ids": micro.unpack(ids_Nk)}
    return found


def _by_chunk(compute: Callable[..., Tensor], temperature: float, *values_N: Tensor) -> Tensor:
    """`compute` for all positions; without a gradient for a few at a time, so that few logits exist in float32."""
    if torch.is_grad_enabled():
        return compute(temperature, *values_N)
    chunks = zip(*(values.split(LOGPROB_CHUNK) for values in values_N), strict=True)
    return torch.cat([compute(temperature, *chunk) for chunk in chunks])


def _next_token_logprobs(temperature: float, logits_Nv: Tensor, next_N: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(_scaled(logits_Nv, temperature), next_N)


def _entropy(temperature: float, logits_Nv: Tensor) -> Tensor:
    return _VocabParallelEntropy.apply(_scaled(logits_Nv, temperature))


def _scaled(logits_Nv: Tensor, temperature: float) -> Tensor:
    """A float32 copy in any case, because the cross entropy works in place."""
    scaled_Nv = logits_Nv.to(torch.float32, copy=True)
    return scaled_Nv.div_(temperature) if temperature != 1 else scaled_Nv


def _largest(logits_Nv: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if dist.get_world_size(_tensor_parallel_group()) > 1:
        raise RuntimeError("topk_logits take the whole vocabulary, and tensor parallelism splits it")
    return logits_Nv.topk(count, dim=1)


class _VocabParallelEntropy(torch.autograd.Function):
    """Entropy [N] in nats of the softmax over all ranks' logits [N, v].

    With p the probabilities and H the entropy, dH/dlogit = -p (log p + H): a rank's gradient needs its own slice alone.
    """

    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor) -> Tensor:
        group = _tensor_parallel_group()
        largest_N = logits_Nv.amax(dim=1)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group)
        shifted_Nv = logits_Nv - largest_N[:, None]
        exp_Nv = shifted_Nv.exp()
        sums_2N = torch.stack([exp_Nv.sum(dim=1), (exp_Nv * shifted_Nv).sum(dim=1)])
        dist.all_reduce(sums_2N, dist.ReduceOp.SUM, group)
        total_N, weighted_N = sums_2N
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(shifted_Nv.sub_(log_total_N[:, None]), entropy_N)
        return entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient_N,), (logprobs_Nv, entropy_N) = gradients, ctx.saved_tensors
        return -gradient_N[:, None] * logprobs_Nv.exp() * (logprobs_Nv + entropy_N[:, None])


def _tensor_parallel_group() -> dist.ProcessGroup | None:
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return get_tensor_model_parallel_group()
