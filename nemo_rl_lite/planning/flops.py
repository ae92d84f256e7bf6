"""FLOPs of a model's passes over a sequence, and bytes that decoding must read: the one count for plans, for the
balance between replicas, and for the metrics of a run.

Counted are 2 FLOPs a token for each weight of a matrix that the token meets: attention's projections, the MLP, or the
router and the experts that it chooses, and the matrix of the vocabulary. In attention, a token meets itself and those
before it, in each layer, for its scores and for its sum. Not counted: norms, biases, activations, rotary embeddings,
softmax, the loss, the lookup of embeddings, padding, and what is computed a second time to save memory.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from nemo_rl_lite.config.parallel import ParallelDims
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.policy import LoraConfig
from nemo_rl_lite.config.sizes import engine_ranks
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.activation_size import item_bytes
from nemo_rl_lite.planning.model_size import trained_parameters
from nemo_rl_lite.planning.prediction import token_cache_bytes

_ONE_RANK = ParallelDims(tp=1, pp=1, cp=1, ep=1, world=1)


def matrix_weights(shape: ModelShape, experts: int) -> int:
    """Weights of the matrices that `experts` experts a layer, and everything outside experts, multiply with."""
    hidden, sparse = shape.hidden, shape.layers - shape.dense_layers
    attention = hidden * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    shared = 3 * hidden * shape.shared_ffn + (hidden if shape.shared_ffn else 0)
    mixture = hidden * shape.experts + shared + 3 * hidden * shape.expert_ffn * experts
    layers = shape.layers * attention + shape.dense_layers * 3 * hidden * shape.ffn + sparse * mixture
    return layers + shape.vocabulary * hidden


def forward_flops(shape: ModelShape, tokens: float) -> float:
    """FLOPs of a forward pass over a sequence of this length, without adapters."""
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens * (tokens + 1)
    return _matrices(shape, tokens) + attention


@dataclass(frozen=True)
class SequenceFlops:
    """FLOPs of the policy's passes over a sequence, by its number of tokens.

    The backward pass takes twice the forward pass: the gradients of what a matrix was multiplied with, and of its
    weights. With low-rank adapters, the weights of the model's own matrices are frozen and have no gradient: their
    backward pass takes as much as the forward pass. (That of the first layer's first matrix, which is not needed then,
    is counted all the same.)
    """

    shape: ModelShape
    peft: LoraConfig

    def reference(self, tokens: float) -> float:
        """A forward pass of the reference policy, which has no adapters."""
        return forward_flops(self.shape, tokens)

    def forward(self, tokens: float) -> float:
        """A forward pass of the policy."""
        return forward_flops(self.shape, tokens) + 2 * self._adapter_weights * tokens

    def training(self, tokens: float) -> float:
        """A forward and a backward pass of the policy."""
        frozen = _matrices(self.shape, tokens) if self.peft.enabled else 0.0
        return 3 * self.forward(tokens) - frozen

    @cached_property
    def _adapter_weights(self) -> int:
        """Weights of the adapters that a token meets. Each of the experts that it visits has one, be it one that they
        share."""
        if not self.peft.enabled or not self.shape.layers:
            return 0
        visited = replace(self.shape, experts=self.shape.experts_per_token)
        return trained_parameters(visited, _ONE_RANK, self.peft, 0, grouped=False).total


@dataclass(frozen=True)
class DecodingBytes:
    """Bytes that a GPU of an engine must read while it decodes."""

    step: float
    """In each step: the weights of all matrices, of all experts too. (Sequences that decode together visit nearly all
    of them.) Of embeddings that are no matrix of the vocabulary only the rows of the tokens are read."""
    token: float
    """For each token that a sequence has in its KV cache, in each step in which the sequence takes part."""

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> "DecodingBytes":
        weights = matrix_weights(shape, shape.experts) * item_bytes(config)
        return cls(weights / engine_ranks(config), token_cache_bytes(config, shape))


def _matrices(shape: ModelShape, tokens: float) -> float:
    return 2 * matrix_weights(shape, shape.experts_per_token) * tokens
