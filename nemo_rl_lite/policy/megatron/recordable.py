"""What a model needs so that CUDA graphs can record its training passes."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from nemo_rl_lite.errors import TrainingError


def accumulate_where_recorded(bare: list[Any]) -> list[Any]:
    """Let megatron-core wrap the model on the stream on which graphs are recorded: the nodes that accumulate gradients
    run on the stream that they were made on, for ever."""
    for chunk in bare:
        chunk.config.cuda_graph_impl = "full_iteration"
    return bare


def check_recordable(chunks: Sequence[Any]) -> None:
    """Check what the configuration does not show.

    Raises:
        TrainingError: the model has dropout, whose random numbers a graph does not take from the seed of a step.
    """
    for chunk in chunks:
        shares = (chunk.config.hidden_dropout, chunk.config.attention_dropout)
        if any(shares):
            raise TrainingError(
                f"policy.megatron_cfg.cuda_graph_impl: the model has dropout ({max(shares):g}), which CUDA graphs "
                "cannot repeat from a step's seed; set policy.megatron_cfg.cuda_graph_impl=none"
            )


def leave_random_state(chunks: Sequence[Any]) -> None:
    """Let attention without dropout leave the random state as it is. Transformer Engine would copy it to the host and
    back in each layer's forward pass, which takes time, and which a graph cannot record."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "attention_dropout_ctx") and _share(module.attention_dropout) == 0:
            module.attention_dropout_ctx = nullcontext


def _share(dropout: float | nn.Dropout) -> float:
    return dropout.p if isinstance(dropout, nn.Dropout) else dropout
