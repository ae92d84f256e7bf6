"""What a loss reads of the model's last hidden states: logprobs, entropy, the largest logits.

Shapes: b sequences of T tokens in n rows, N positions of them on this context-parallel rank, H hidden, v entries of the
vocabulary on this tensor-parallel rank. All values are float32 and, outside `no_grad`, carry a gradient.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.losses.interface import Loss, Need, needs_of
from nemo_rl_lite.policy.megatron.context import Shard
from nemo_rl_lite.policy.megatron.linear_scores import LinearScores
from nemo_rl_lite.policy.megatron.slice_scores import Head


@dataclass(frozen=True)
class TopLogits:
    """Asks for the `topk` largest logits of each token, in the way in which a loss declares it."""

    topk: int
    needs: ClassVar[frozenset[Need]] = frozenset({"topk_logits"})


def scores_of(
    shard: Shard,
    temperature: float,
    loss: Loss | TopLogits | None,
    wait_for: Callable[[Tensor], None],
    teacher_ids_bTk: Tensor | None = None,
    keep: bool = False,
) -> Callable[..., dict[str, Tensor]]:
    """A function for megatron-core's `output_processor`, which takes the place of the model's last matrix: returns
    `logprobs` [b, T] of the micro-batch's tokens and, under the names of `Batch`'s fields, what `loss` needs besides,
    with `teacher_ids_bTk` for `student_topk_logprobs`. `wait_for` is called with the matrix before it is used, because
    the forward pass of its module does not run. `keep`: a backward pass follows, and the logits are kept for it.
    """
    needs = frozenset() if loss is None else needs_of(loss)
    of_teacher = "student_topk_logprobs" in needs
    if of_teacher and teacher_ids_bTk is None:
        raise ValueError("the loss reads student_topk_logprobs, and this run's batches have no teacher_topk_ids")
    topk = loss.topk if "topk_logits" in needs else 0  # pyrefly: ignore  # a loss with this need has it

    def scores(
        hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: object
    ) -> dict[str, Tensor]:
        weight_vH = output_layer.weight if output_weight is None else output_weight
        wait_for(weight_vH)
        cap, group = soft_cap_of(output_layer), _vocabulary_group()
        head = Head(temperature, cap, "entropy" in needs, topk, group, keep, others=of_teacher)
        hidden_NH = _of_all_ranks(hidden_states, output_layer).transpose(0, 1).flatten(0, 1)
        next_N = shard.next_tokens_nS.flatten()
        others_Nk = shard.pack(teacher_ids_bTk) if of_teacher and teacher_ids_bTk is not None else None
        names = ("logprobs", "entropy", "topk_logits", "topk_ids", "student_topk_logprobs")
        found = dict(zip(names, LinearScores.apply(hidden_NH, weight_vH, next_N, others_Nk, head), strict=True))
        return {name: shard.unpack(values) for name, values in found.items() if values is not None}

    return scores


def check_scorable(model: Any) -> None:
    """Check that the last stage of a model gives its hidden states to `scores_of`.

    Raises:
        TrainingError: it has a last matrix of its own kind, or megatron-core's class for it has no such hook.
    """
    if "output_processor" not in inspect.signature(model.forward).parameters:
        raise TrainingError(
            f"policy.model_name: megatron-core's {type(model).__name__} has no output_processor, by which logprobs are "
            "computed; choose a model whose class there is GPTModel"
        )
    soft_cap_of(model.output_layer)


def soft_cap_of(output_layer: Any) -> float | None:
    """The soft cap of the logits (Gemma 2), or None.

    Raises:
        TrainingError: the layer does something else than to multiply, which `LinearScores` would leave out.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear

    kind, cap = type(output_layer), getattr(output_layer.config, "final_logit_softcapping", None)
    multiplies = isinstance(output_layer, ColumnParallelLinear) and output_layer.bias is None
    if not multiplies or output_layer.config.use_mup or (kind.forward is not ColumnParallelLinear.forward and not cap):
        raise TrainingError(
            f"policy.model_name: the output layer of this model ({kind.__name__}) is not a plain matrix, which is all "
            "that logprobs can be computed of; choose another model, or no adapter on output_layer"
        )
    return cap if kind.forward is not ColumnParallelLinear.forward else None


def _of_all_ranks(hidden_SnH: Tensor, output_layer: Any) -> Tensor:
    """The hidden states of all positions; in the backward pass, the sum of the gradients of all ranks."""
    from megatron.core.tensor_parallel import mappings

    if output_layer.sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(hidden_SnH, group=_vocabulary_group())
    return mappings.copy_to_tensor_model_parallel_region(hidden_SnH, group=_vocabulary_group())


def _vocabulary_group() -> Any:
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return get_tensor_model_parallel_group()
