"""Parameters of a model, and of one rank under megatron-core's parallelism.

The counts hold for models like Llama, Qwen2, Qwen3 and Mixtral, with or without experts: grouped-query attention,
RMSNorm, gated MLPs. Latent attention (DeepSeek) is counted as if it were grouped-query attention.
"""

from dataclasses import dataclass

from nemo_rl_lite.config.parallel import ParallelDims
from nemo_rl_lite.config.sections.policy import LoraConfig
from nemo_rl_lite.models.shape import ModelShape


@dataclass(frozen=True)
class Parameters:
    """Parameters of one rank. The two kinds are replicated over different groups of ranks."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the whole model."""
    layers = sum(_in_layers(shape, shape.layers, tensor=1, expert=1))
    embeddings = 1 if shape.tied_embeddings else 2
    return layers + embeddings * shape.vocabulary * shape.hidden + shape.hidden


def rank_parameters(shape: ModelShape, dims: ParallelDims, stage: int) -> Parameters:
    """Parameters of a rank of pipeline stage `stage`, from 0.

    Layers that are not alike count as the mean one. Whole experts are spread over expert-parallel ranks; a
    tensor-parallel group does not split single experts. Tied embeddings are on the first and on the last stage. The
    vocabulary is not padded, since it must be a multiple of the tensor parallel size.
    """
    dense, experts = _in_layers(shape, dims.stage_layers(shape.layers)[stage], dims.tp, dims.ep)
    first, last = stage == 0, stage == dims.pp - 1
    matrices = 1 if dims.pp == 1 and shape.tied_embeddings else first + last
    dense += matrices * shape.vocabulary * shape.hidden // dims.tp + (shape.hidden if last else 0)
    return Parameters(dense, experts)


def unlike_the_engine(shape: ModelShape, dims: ParallelDims, stage: int) -> int:
    """Weights of a rank of pipeline stage `stage` that an engine with the same tensor parallel size has in another
    order: Megatron has the queries, keys and values of a group of heads together, vLLM all queries, all keys and all
    values."""
    columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return dims.stage_layers(shape.layers)[stage] * columns * (shape.hidden + (1 if shape.qkv_bias else 0)) // dims.tp


def trained_parameters(
    shape: ModelShape, dims: ParallelDims, peft: LoraConfig, stage: int, grouped: bool
) -> Parameters:
    """Parameters that have gradients: all, or with LoRA those of the adapters. A rank's experts share an adapter if
    they are `grouped`, as on GPUs."""
    if not peft.enabled:
        return rank_parameters(shape, dims, stage)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def of_mlp(width: int) -> dict[str, int]:
        return {"linear_fc1": shape.hidden + 2 * width, "linear_fc2": width + shape.hidden}

    attention = {"linear_qkv": shape.hidden + queries + 2 * keys, "linear_proj": queries + shape.hidden}
    sparse = shape.layers - shape.dense_layers
    widths = [(shape.layers, attention), (shape.dense_layers, of_mlp(shape.ffn))]
    widths += [(sparse, of_mlp(shape.shared_ffn))] if shape.shared_ffn else []
    dense, experts = (
        sum(layers * sizes.get(name, 0) for layers, sizes in kinds for name in peft.target_modules)
        for kinds in (widths, [(sparse, of_mlp(shape.expert_ffn))])
    )
    experts *= 1 if grouped else shape.experts // dims.ep
    own = dims.stage_layers(shape.layers)[stage]
    dense, experts = (count * peft.dim * own // shape.layers for count in (dense, experts))
    return Parameters(dense // dims.tp, experts)


def served_adapters(shape: ModelShape, peft: LoraConfig) -> int:
    """Elements of the adapters that engines get: A and B of each of a layer's projections, those that Megatron fuses
    included, which share their A in the policy."""
    whole = trained_parameters(shape, ParallelDims(tp=1, pp=1, cp=1, ep=1, world=1), peft, stage=0, grouped=True).total
    again = {"linear_qkv": 2, "linear_fc1": 1}
    return whole + sum(again.get(name, 0) for name in peft.target_modules) * shape.layers * shape.hidden * peft.dim


def _in_layers(shape: ModelShape, layers: int, tensor: int, expert: int) -> tuple[int, int]:
    """Parameters that one rank has of `layers` of the model's layers: outside experts, and in experts."""
    hidden, sparse = shape.hidden, shape.layers - shape.dense_layers
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    split = hidden * (2 * queries + 2 * keys) + (queries + 2 * keys if shape.qkv_bias else 0)
    whole = 2 * hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    dense = shape.layers * (split // tensor + whole) + shape.dense_layers * _gated(hidden, shape.ffn) // tensor
    if sparse:
        shared = _gated(hidden, shape.shared_ffn) // tensor + (hidden if shape.shared_ffn else 0)
        dense += sparse * (hidden * shape.experts + shared)
    experts = sparse * shape.experts * _gated(hidden, shape.expert_ffn) // expert
    return dense * layers // shape.layers, experts * layers // shape.layers


def _gated(hidden: int, ffn: int) -> int:
    return 3 * hidden * ffn
