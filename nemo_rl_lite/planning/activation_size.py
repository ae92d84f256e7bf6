"""Bytes of activations and logits, from the model's shape and the size of a micro-batch.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4: the tensors
that each operation of a layer keeps for its backward pass. Their layer keeps 34 bytes a token and hidden unit in
addition to attention scores, dropout masks included. Ours has no dropout, but grouped-query attention, RMSNorm and a
gated MLP. With h the hidden size, q and k the widths of all queries and of all keys, and f the MLP's width, it keeps,
in elements a token:

    inputs and outputs of the two norms          4 h
    queries, keys and values as attended to      q + 2 k     and q + k more where they are normalised
    attention's output                           q
    gated MLP                                    3 f fused, 5 f on CPUs, where it is computed step by step

Measured activations of SmolLM2-135M and of a 1.7 B Qwen3 are within 3 % of this, and offloaded whole modules of the
latter within 1 % (docs/benchmarks). Experts, pipeline stages and CPUs were not measured.
"""

from dataclasses import dataclass, replace

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.automatic import keeps_logits, mb_tokens
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import (
    VOCABULARY_SLICE,
    batch_mode,
    micro_batch_sizes,
    on_gpus,
    parallel_dims,
    row_round,
    samples_per_step,
    sequences_per_optimizer_step,
    sequences_together,
)
from nemo_rl_lite.models.shape import ModelShape


@dataclass(frozen=True)
class MicroBatch:
    """`tokens` of the model's input, in rows of `row` tokens."""

    tokens: int
    row: int


def micro_batch(config: Config, training: bool) -> MicroBatch:
    """The largest micro-batch of training, or of logprob inference. Context-parallel ranks share it."""
    policy = config.policy
    longest, mode = policy.max_total_sequence_length, batch_mode(policy, on_gpus(config))
    together = sequences_together(config) if training else 1
    if mode == "fixed":
        for_training, for_logprobs = micro_batch_sizes(config)
        return MicroBatch((for_training * together if training else for_logprobs) * longest, longest)
    # A sequence or pair above the limit is a micro-batch by itself.
    tokens = max(mb_tokens(policy, mode, training), together * longest)
    share = _sequences(config, training)
    if share is not None:
        tokens = min(tokens, share * longest)
    round_to = row_round(policy)
    tokens = -(-tokens // round_to) * round_to
    return MicroBatch(tokens, tokens if mode == "packed" else longest)


def own_part(config: Config, training: bool) -> MicroBatch:
    """What one rank has of the largest micro-batch."""
    whole = micro_batch(config, training)
    return replace(whole, tokens=-(-whole.tokens // parallel_dims(config).cp))


def _sequences(config: Config, training: bool) -> int | None:
    """Sequences that a replica processes per call; None if unknown, as for a validation set."""
    if training:
        return -(-sequences_per_optimizer_step(config) // parallel_dims(config).dp)
    return -(-samples_per_step(config) // parallel_dims(config).dp) if generates(config) else None


def item_bytes(config: Config) -> int:
    return 2 if config.policy.precision == "bfloat16" else 4


def hidden_bytes(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Bytes of the hidden states between two layers. Tensor-parallel ranks all hold them, unless they split the
    sequence."""
    parallel = config.policy.megatron_cfg
    ranks = parallel_dims(config).tp if parallel.sequence_parallel else 1
    return batch.tokens * item_bytes(config) * shape.hidden / ranks


def layer_bytes(config: Config, shape: ModelShape, batch: MicroBatch) -> dict[str, float]:
    """Bytes that a layer keeps for its backward pass, by module: the names of `offload_modules`, and `rest`. For a
    model with experts, the mean over its layers."""
    tensor, item, hidden = parallel_dims(config).tp, item_bytes(config), hidden_bytes(config, shape, batch)
    # Bytes of one tensor per unit of its width.
    elements = batch.tokens * item / tensor
    queries, keys = elements * shape.heads * shape.head_dim, elements * shape.kv_heads * shape.head_dim
    sparse = 1 - shape.dense_layers / shape.layers
    shared = sparse * elements * shape.shared_ffn
    # With tensor parallelism, experts require a split sequence, so each rank dispatches its own tokens.
    dispatched = sparse * shape.experts_per_token
    fused = on_gpus(config)
    # Flash attention keeps one number a token and head, megatron-core's own attention all scores, both in float32.
    scores = batch.tokens * 4 * shape.heads / tensor * (1 if on_gpus(config) else batch.row)
    return {
        # Transformer Engine fuses a norm into the following linear layer, except for the norm before experts.
        "attn_norm": 0.0,
        "qkv_linear": 2 * hidden + (queries + keys if shape.qk_norm else 0),
        "core_attn": queries + 2 * keys,
        "attn_proj": queries,
        "mlp_norm": sparse * hidden,
        "mlp": 2 * (1 - sparse) * hidden + (3 if fused else 5) * (1 - sparse) * elements * shape.ffn,
        "expert_fc1": dispatched * hidden,
        # The router's probability multiplies the expert's activation, which is one more tensor.
        "moe_act": dispatched * elements * (3 if fused else 6) * shape.expert_ffn,
        "rest": sparse * (hidden + 8 * batch.tokens * shape.experts) + (3 if fused else 5) * shared + scores,
    }


def mlp_gradients(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Bytes of the gradients of a gated MLP's two inner tensors and of their product, for a layer's mean width."""
    sparse = 1 - shape.dense_layers / shape.layers
    width = (1 - sparse) * shape.ffn + sparse * (shape.experts_per_token * shape.expert_ffn + shape.shared_ffn)
    return 3 * width * batch.tokens * item_bytes(config) / parallel_dims(config).tp


def training_activations(config: Config, shape: ModelShape, stage: int) -> tuple[int, int]:
    """Bytes (device, host) at the start of the backward pass of pipeline stage `stage`, where memory peaks.

    Stage s of p holds the activations of p - s micro-batches.
    """
    parallel, batch = config.policy.megatron_cfg, own_part(config, training=True)
    dims = parallel_dims(config)
    layer = layer_bytes(config, shape, batch)
    layers, in_flight = dims.stage_layers(shape.layers)[stage], dims.pp - stage
    hidden = hidden_bytes(config, shape, batch)
    kept = hidden if parallel.activation_checkpointing else sum(layer.values())
    head = 0.0
    if stage == dims.pp - 1:
        head = 2 * hidden + head_bytes(config, shape, batch)
    waiting = 0.0
    if parallel.fine_grained_activation_offloading and not parallel.activation_checkpointing:
        # The inputs of the last layer stay on the device: the backward pass needs them first.
        chosen = parallel.activation_offload_fraction * sum(layer[module] for module in parallel.offload_modules or ())
        waiting = (layers * in_flight - 1) * chosen
    # After the head, the gradient of a layer takes about as many bytes as the layer's activations. A recomputed layer
    # has both at once; then the gradients of its MLP count most.
    working = sum(layer.values()) + (mlp_gradients(config, shape, batch) if parallel.activation_checkpointing else 0.0)
    device = layers * in_flight * kept - waiting + max(head, working)
    return int(device), int(waiting)


def logprob_activations(config: Config, shape: ModelShape, stage: int) -> int:
    """Peak bytes of logprob inference on pipeline stage `stage`: in a layer, or for logits."""
    batch = own_part(config, training=False)
    working = sum(layer_bytes(config, shape, batch).values())
    if stage < parallel_dims(config).pp - 1:
        return int(working)
    return int(max(slice_logits(config, shape, batch) * (item_bytes(config) + 4), working))


def slice_logits(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Logits that exist at the same time (`linear_scores`)."""
    return batch.tokens * min(VOCABULARY_SLICE, shape.vocabulary / parallel_dims(config).tp)


def head_bytes(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Bytes at the start of the backward pass: a slice's logits in float32 and their gradient in the model's precision,
    the float32 gradient of the hidden states, that of the last matrix, and the logits that are kept."""
    item = item_bytes(config)
    matrix = item * shape.hidden * shape.vocabulary / parallel_dims(config).tp
    kept = kept_logits(config, shape, batch) if keeps_logits(config.policy) else 0.0
    return slice_logits(config, shape, batch) * (4 + item) + batch.tokens * shape.hidden * 4 + matrix + kept


def kept_logits(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Bytes of a micro-batch's logits on one rank, where they are kept for the backward pass."""
    return batch.tokens * item_bytes(config) * shape.vocabulary / parallel_dims(config).tp
