"""Counts the parameters of a policy rank and of LoRA's adapters, and the FLOPs of the policy's passes.

Models are like Llama, Qwen2, Qwen3 and Mixtral, with or without experts: grouped-query or latent attention, RMSNorm,
gated MLPs.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from nemo_rl_lite.config.schema import LoraConfig
from nemo_rl_lite.config.sizes import ParallelDims, adapted_layers
from nemo_rl_lite.models.flops import attention_weights, forward_flops, matrix_flops
from nemo_rl_lite.models.shape import ModelShape

_ONE_RANK = ParallelDims(tp=1, pp=1, cp=1, ep=1, world=1)


@dataclass(frozen=True)
class Parameters:
    """Numbers of a rank's parameters outside and inside experts."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def parameter_count(shape: ModelShape) -> int:
    layers = sum(_in_layers(shape, shape.layers, tensor=1, expert=1))
    embeddings = 1 if shape.tied_embeddings else 2
    return layers + embeddings * shape.vocabulary * shape.hidden + shape.hidden


def rank_parameters(shape: ModelShape, dims: ParallelDims, stage: int) -> Parameters:
    """Count the parameters of a rank of a pipeline stage, with layers of mean size. Tied embeddings are on the first
    and the last stage. The vocabulary is a multiple of the tensor parallel size."""
    dense, experts = _in_layers(shape, dims.stage_layers(shape.layers)[stage], dims.tp, dims.ep * dims.etp)
    first, last = stage == 0, stage == dims.pp - 1
    matrices = 1 if dims.pp == 1 and shape.tied_embeddings else first + last
    dense += matrices * shape.vocabulary * shape.hidden // dims.tp + (shape.hidden if last else 0)
    return Parameters(dense, experts)


def unlike_the_engine(shape: ModelShape, dims: ParallelDims, stage: int) -> int:
    """Count a rank's weights whose order differs in an engine of the same tensor parallel size.

    Megatron groups queries, keys and values by heads; vLLM has all queries, then all keys, then all values.
    """
    if shape.latent:
        # vLLM fuses the matrices that compress.
        return dims.stage_layers(shape.layers)[stage] * shape.hidden * (shape.latent.queries + shape.latent.cached)
    columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return dims.stage_layers(shape.layers)[stage] * columns * (shape.hidden + (1 if shape.qkv_bias else 0)) // dims.tp


def trained_parameters(
    shape: ModelShape, dims: ParallelDims, peft: LoraConfig, stage: int, grouped: bool
) -> Parameters:
    """Count the trained parameters: all, or LoRA's adapters. `grouped` experts of a rank share an adapter, as on
    GPUs."""
    if not peft.enabled:
        return rank_parameters(shape, dims, stage)
    targets = adapted_layers(peft, shape.linear_layers)

    def of_mlp(width: int) -> dict[str, int]:
        return {"linear_fc1": shape.hidden + 2 * width, "linear_fc2": width + shape.hidden}

    attention = _attention_widths(shape)
    sparse = shape.layers - shape.dense_layers
    widths = [(shape.layers, attention), (shape.dense_layers, of_mlp(shape.ffn))]
    widths += [(sparse, of_mlp(shape.shared_ffn))] if shape.shared_ffn else []
    dense, experts = (
        sum(layers * sizes.get(name, 0) for layers, sizes in kinds for name in targets)
        for kinds in (widths, [(sparse, of_mlp(shape.expert_ffn))])
    )
    experts *= 1 if grouped else shape.experts // dims.ep
    own = dims.stage_layers(shape.layers)[stage]
    dense, experts = (count * peft.dim * own // shape.layers for count in (dense, experts))
    return Parameters(dense // dims.tp, experts)


def _attention_widths(shape: ModelShape) -> dict[str, int]:
    """Return inputs plus outputs of attention's linear layers, by their names."""
    hidden, latent, queries = shape.hidden, shape.latent, shape.heads * shape.head_dim
    widths = {"linear_proj": shape.heads * shape.value_dim + hidden}
    if latent is None:
        return widths | {"linear_qkv": hidden + queries + 2 * shape.kv_heads * shape.head_dim}
    keys_and_values = shape.heads * (shape.head_dim - latent.rotary + latent.values)
    return widths | {
        "linear_q_proj": hidden + queries,
        "linear_q_down_proj": hidden + latent.queries,
        "linear_q_up_proj": latent.queries + queries,
        "linear_kv_down_proj": hidden + latent.cached,
        "linear_kv_up_proj": latent.keys + keys_and_values,
    }


def whole_trained_parameters(shape: ModelShape, peft: LoraConfig, grouped: bool) -> int:
    """Count the trained parameters of the whole model."""
    return trained_parameters(shape, _ONE_RANK, peft, stage=0, grouped=grouped).total


def served_adapters(shape: ModelShape, peft: LoraConfig) -> int:
    """Count the elements of the adapters in engines. Each projection has its own A; in the policy, projections that
    Megatron fuses share one."""
    whole = trained_parameters(shape, _ONE_RANK, peft, stage=0, grouped=True).total
    again = {"linear_qkv": 2, "linear_fc1": 1}
    targets = adapted_layers(peft, shape.linear_layers)
    return whole + sum(again.get(name, 0) for name in targets) * shape.layers * shape.hidden * peft.dim


def _in_layers(shape: ModelShape, layers: int, tensor: int, expert: int) -> tuple[int, int]:
    """Count a rank's parameters in `layers` layers: outside and inside experts."""
    hidden, sparse, latent = shape.hidden, shape.layers - shape.dense_layers, shape.latent
    split, whole = attention_weights(shape)
    split += (shape.heads + 2 * shape.kv_heads) * shape.head_dim if shape.qkv_bias and not latent else 0
    whole += 2 * hidden + (2 * shape.head_dim if shape.qk_norm else 0) + (latent.keys + latent.queries if latent else 0)
    dense = shape.layers * (split // tensor + whole) + shape.dense_layers * 3 * hidden * shape.ffn // tensor
    if sparse:
        shared = 3 * hidden * shape.shared_ffn // tensor + (hidden if shape.shared_gate else 0)
        dense += sparse * (hidden * shape.experts + shared)
    experts = sparse * shape.experts * 3 * hidden * shape.expert_ffn // expert
    return dense * layers // shape.layers, experts * layers // shape.layers


@dataclass(frozen=True)
class SequenceFlops:
    """FLOPs of the policy's passes over a sequence, by its number of tokens.

    The backward pass takes twice the forward pass, for gradients of inputs and of weights. Weights that LoRA freezes
    have no gradient.
    """

    shape: ModelShape
    peft: LoraConfig

    def reference(self, tokens: float) -> float:
        """Return the FLOPs of a forward pass of the reference, which has no adapters."""
        return forward_flops(self.shape, tokens)

    def forward(self, tokens: float) -> float:
        """Return the FLOPs of a forward pass of the policy."""
        return forward_flops(self.shape, tokens) + 2 * self._adapter_weights * tokens

    def training(self, tokens: float) -> float:
        """Return the FLOPs of a forward and a backward pass of the policy."""
        frozen = matrix_flops(self.shape, tokens) if self.peft.enabled else 0.0
        return 3 * self.forward(tokens) - frozen

    @cached_property
    def _adapter_weights(self) -> int:
        """Weights of the adapters that a token passes, counted once per expert even if experts share one."""
        if not self.peft.enabled or not self.shape.layers:
            return 0
        visited = replace(self.shape, experts=self.shape.experts_per_token)
        return trained_parameters(visited, _ONE_RANK, self.peft, 0, grouped=False).total
