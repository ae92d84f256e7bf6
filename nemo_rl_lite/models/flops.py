"""Count a model's matrix weights, and the FLOPs of its passes.

FLOPs are 2 per token and weight of each matrix: attention's projections, the MLP or the router and the chosen experts,
and the LM head. Causal attention adds the products for scores and for the weighted sum. Not counted: norms, biases,
activations, rotary embeddings, softmax, the loss, embedding lookups, padding and recomputation.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from nemo_rl_lite.models.shape import ModelShape, known_shape


def attention_weights(shape: ModelShape) -> tuple[int, int]:
    """Count the weights of an attention layer's matrices: those that tensor-parallel ranks split, and those that each
    rank has."""
    hidden, latent = shape.hidden, shape.latent
    queries, attended = shape.heads * shape.head_dim, shape.heads * shape.value_dim
    if latent is None:
        return hidden * (queries + 2 * shape.kv_heads * shape.head_dim + attended), 0
    keys_and_values = shape.heads * (shape.head_dim - latent.rotary + latent.values)
    split = (latent.queries or hidden) * queries + latent.keys * keys_and_values + attended * hidden
    return split, hidden * (latent.queries + latent.cached)


def matrix_weights(shape: ModelShape, experts: int) -> int:
    """Count the weights of all matrices, with `experts` experts per layer."""
    hidden, sparse = shape.hidden, shape.layers - shape.dense_layers
    attention = sum(attention_weights(shape))
    shared = 3 * hidden * shape.shared_ffn + (hidden if shape.shared_gate else 0)
    mixture = hidden * shape.experts + shared + 3 * hidden * shape.expert_ffn * experts
    layers = shape.layers * attention + shape.dense_layers * 3 * hidden * shape.ffn + sparse * mixture
    return layers + shape.vocabulary * hidden


def forward_flops(shape: ModelShape, tokens: float) -> float:
    """Return the FLOPs of a forward pass over a sequence, without adapters."""
    return matrix_flops(shape, tokens) + attention_flops(shape, tokens)


def forward_cost(folder: Path) -> Callable[[int], float]:
    """Return the work of a sequence by its number of tokens: the FLOPs of a forward pass of the model in `folder`. If
    its sizes are unknown, the work is the tokens."""
    shape = known_shape(folder)
    return float if shape is None else partial(forward_flops, shape)


def attention_flops(shape: ModelShape, tokens: float) -> float:
    """Return the FLOPs of causal attention's two products over a sequence, in all layers."""
    return shape.layers * shape.heads * (shape.head_dim + shape.value_dim) * tokens * (tokens + 1)


def matrix_flops(shape: ModelShape, tokens: float) -> float:
    """Return the FLOPs of the products with all matrices, of a token's own experts only, over a sequence."""
    return 2 * matrix_weights(shape, shape.experts_per_token) * tokens
