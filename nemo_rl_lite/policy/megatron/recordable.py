"""What a model needs so that CUDA graphs can record its training passes."""

from collections.abc import Sequence
from typing import Any

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
