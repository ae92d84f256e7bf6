"""Predicts the bytes of each component and phase on the policy rank with the highest peak.

**Activations** follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4: the tensors that each operation of a layer keeps for its backward pass. The layer has no dropout, and has
grouped-query attention, RMSNorm and a gated MLP. With hidden size h, total widths q of queries and k of keys, and MLP
width f, it keeps, in elements per token:

    inputs and outputs of the two norms          4 h
    queries, keys and values as attended to      q + 2 k
    before their norms, where they have these    q + k, and k more where one kernel makes all three
    attention's output                           q
    gated MLP                                    3 f fused, 5 f on CPUs, where it is not

Measured activations of SmolLM2-135M and Qwen3-1.7B are within 3 % of the prediction (docs/benchmarks). Experts,
pipeline stages and CPUs were not measured.

Latent attention keeps its compressed queries, keys and values in addition. `planning/parameters.py` counts parameters.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, gcd

from nemo_rl_lite.config.algorithms import generates, has_teacher
from nemo_rl_lite.config.engines import (
    engine_of,
    engines_serve_adapters,
    engines_share_weights,
    has_draft_model,
    speculation,
)
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import (
    VOCABULARY_SLICE,
    as_teacher,
    batch_mode,
    engine_ranks,
    keeps_logits,
    least_saved,
    makes_inputs_at_once,
    mb_tokens,
    micro_batch_sizes,
    on_gpus,
    parallel_dims,
    prompt_siblings,
    recomputed_modules,
    records_training,
    row_round,
    samples_per_step,
    sequences_per_optimizer_step,
    sequences_together,
    teacher_topk,
)
from nemo_rl_lite.config.sources import teacher_configs
from nemo_rl_lite.models.draft import DraftShape, draft_shape, own_draft_layers
from nemo_rl_lite.models.flops import attention_flops, attention_weights, forward_flops, matrix_weights
from nemo_rl_lite.models.shape import ModelShape, NoModelError, find_shape
from nemo_rl_lite.offload.residency import Component, Phase, Place, Residency
from nemo_rl_lite.planning.parameters import (
    Parameters,
    parameter_count,
    rank_parameters,
    served_adapters,
    trained_parameters,
    unlike_the_engine,
)

log = logging.getLogger(__name__)

# Modules of `offload_modules` that consist of others.
_FUSED = {"fused_group_mlp": ("expert_fc1", "moe_act")}


@dataclass(frozen=True)
class MicroBatch:
    """`tokens` of the model's input, in rows of `row` tokens."""

    tokens: int
    row: int


def micro_batch(config: Config, training: bool) -> MicroBatch:
    """Return the largest micro-batch of training or logprob inference, which context-parallel ranks share."""
    policy = config.policy
    longest, mode = policy.max_total_sequence_length, batch_mode(policy, on_gpus(config))
    together = sequences_together(config) if training else 1
    if mode == "fixed":
        for_training, for_logprobs = micro_batch_sizes(config)
        return MicroBatch((for_training * together if training else for_logprobs) * longest, longest)
    # A sequence or pair above the limit is a separate micro-batch.
    tokens = max(mb_tokens(policy, mode, training), together * longest)
    # The size of a validation set is unknown.
    if training or generates(config):
        sequences = sequences_per_optimizer_step(config) if training else samples_per_step(config)
        tokens = min(tokens, -(-sequences // parallel_dims(config).dp) * longest)
    round_to = row_round(policy, parallel_dims(config).cp)
    tokens = -(-tokens // round_to) * round_to
    return MicroBatch(tokens, tokens if mode == "packed" else longest)


def siblings_per_pack(config: Config, shape: ModelShape, prompt: float, response: float, training: bool) -> float:
    """Return how many sequences of a pack share a prompt, at these mean lengths; 1 if prompts are not shared."""
    siblings = prompt_siblings(config)
    if siblings == 1 or shape.latent is not None:
        return 1.0
    sequences = sequences_per_optimizer_step(config) if training else samples_per_step(config)
    siblings = gcd(siblings, -(-sequences // max(1, parallel_dims(config).dp)))
    count = max(1.0, min(siblings, (micro_batch(config, training).tokens - prompt) / response))
    saved = prompt * (1 - 1 / count)
    return count if saved > least_saved(config.policy) * (prompt + response) else 1.0


def key_copies(config: Config, shape: ModelShape, training: bool) -> float:
    """Return the keys that attention reads per token of a pack with shared prompts: copies of a prompt's keys for each
    of its sequences. Responses have half of `max_new_tokens`, and prompts the rest; 0 if prompts are not shared."""
    if prompt_siblings(config) == 1:
        return 0.0
    response = config.generation.max_new_tokens / 2
    prompt = max(1.0, config.policy.max_total_sequence_length - 2 * response)
    count = siblings_per_pack(config, shape, prompt, response, training)
    return (prompt + count * (prompt + response)) / (prompt + count * response) if count > 1 else 0.0


def own_part(config: Config, training: bool) -> MicroBatch:
    """Return one rank's part of the largest micro-batch."""
    whole = micro_batch(config, training)
    return replace(whole, tokens=-(-whole.tokens // parallel_dims(config).cp))


def item_bytes(config: Config) -> int:
    return 2 if config.policy.precision == "bfloat16" else 4


def gradient_bytes(config: Config) -> int:
    """Return the bytes of a gradient's sum."""
    in_float32 = config.policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32
    return 4 if in_float32 else item_bytes(config)


def hidden_bytes(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Return the bytes of the hidden states between two layers. Tensor-parallel ranks replicate them without sequence
    parallelism."""
    ranks = parallel_dims(config).tp if config.policy.megatron_cfg.sequence_parallel else 1
    return batch.tokens * item_bytes(config) * shape.hidden / ranks


def layer_bytes(config: Config, shape: ModelShape, batch: MicroBatch) -> dict[str, float]:
    """Return the bytes that a layer keeps for its backward pass, by the names of `offload_modules`, and `scores` of
    attention, `router` and `shared_experts`. With experts, return the mean over layers."""
    tensor, item, hidden = parallel_dims(config).tp, item_bytes(config), hidden_bytes(config, shape, batch)
    # Bytes of one tensor per unit of width.
    elements = batch.tokens * item / tensor
    queries, keys = elements * shape.heads * shape.head_dim, elements * shape.kv_heads * shape.head_dim
    values, attended = elements * shape.kv_heads * shape.value_dim, elements * shape.heads * shape.value_dim
    # Inputs of the norms and of the matrices after them, on each tensor-parallel rank.
    compressed = 2 * batch.tokens * item * (shape.latent.keys + shape.latent.queries) if shape.latent else 0.0
    sparse = 1 - shape.dense_layers / shape.layers
    shared = sparse * elements * shape.shared_ffn
    # With tensor parallelism, experts require sequence parallelism, so each rank dispatches its own tokens.
    dispatched = sparse * shape.experts_per_token
    fused = on_gpus(config)
    of_norms = queries + keys + (values if makes_inputs_at_once(config.policy, fused) else 0.0)
    # Flash attention keeps one float32 per token and head; megatron-core's attention keeps all scores.
    scores = batch.tokens * 4 * shape.heads / tensor * (1 if fused else batch.row)
    return {
        # Transformer Engine fuses norms into the next linear layer, except before experts.
        "attn_norm": 0.0,
        "qkv_linear": 2 * hidden + compressed + (of_norms if shape.qk_norm else 0.0),
        "core_attn": queries + keys + values,
        "attn_proj": attended,
        "mlp_norm": sparse * hidden,
        "mlp": 2 * (1 - sparse) * hidden + (3 if fused else 5) * (1 - sparse) * elements * shape.ffn,
        "expert_fc1": dispatched * hidden,
        # Multiplying by the router's probability keeps one more tensor.
        "moe_act": dispatched * elements * (3 if fused else 6) * shape.expert_ffn,
        "router": sparse * (hidden + 8 * batch.tokens * shape.experts),
        "shared_experts": (3 if fused else 5) * shared,
        "scores": scores,
    }


def selectively_recomputed(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Return the bytes of a layer that selective recomputation does not keep. The inputs of its modules are kept."""
    sparse, hidden = 1 - shape.dense_layers / shape.layers, hidden_bytes(config, shape, batch)
    layer, modules = layer_bytes(config, shape, batch), set(recomputed_modules(config.policy.megatron_cfg))
    of_experts = layer["expert_fc1"] + layer["moe_act"] + layer["router"] - sparse * hidden + layer["shared_experts"]
    saved = {
        "core_attn": layer["scores"],
        # Only norms that are not fused into the next linear layer.
        "layernorm": sparse * hidden if on_gpus(config) else 2 * hidden,
        "mlp": layer["mlp"] - (1 - sparse) * hidden,
        "moe": of_experts,
        "moe_act": 0.0 if "moe" in modules else layer["moe_act"] / 3,
        "shared_experts": 0.0 if "moe" in modules else layer["shared_experts"],
    }
    return sum(saved[name] for name in modules)


def kept_activations(config: Config, shape: ModelShape, batch: MicroBatch, layers: int) -> float:
    """Return the bytes that `layers` layers keep of a micro-batch for the backward pass."""
    parallel, each = config.policy.megatron_cfg, sum(layer_bytes(config, shape, batch).values())
    if not parallel.activation_checkpointing:
        return layers * each
    if parallel.recompute_granularity == "selective":
        return layers * (each - selectively_recomputed(config, shape, batch))
    inputs, number = hidden_bytes(config, shape, batch), min(parallel.recompute_num_layers, layers)
    if parallel.recompute_method == "block":
        return number * inputs + (layers - number) * each
    return ceil(layers / number) * inputs


def recomputed_at_once(config: Config, layers: int) -> int:
    """Return how many of a stage's layers the backward pass recomputes together; 0 if it recomputes none."""
    parallel = config.policy.megatron_cfg
    if not parallel.activation_checkpointing:
        return 0
    uniform = parallel.recompute_granularity == "full" and parallel.recompute_method == "uniform"
    return min(parallel.recompute_num_layers, layers) if uniform else 1


def recomputed_share(config: Config, shape: ModelShape, layers: int, tokens: float) -> float:
    """Return the share of the layers' forward FLOPs that the backward pass repeats, at this length of sequences."""
    parallel = config.policy.megatron_cfg
    if not parallel.activation_checkpointing:
        return 0.0
    if parallel.recompute_granularity == "full":
        return min(1.0, parallel.recompute_num_layers / layers) if parallel.recompute_method == "block" else 1.0
    sparse, modules = shape.layers - shape.dense_layers, recomputed_modules(parallel)
    experts = sparse * 6 * shape.hidden * shape.expert_ffn * shape.experts_per_token * tokens
    shared = sparse * 6 * shape.hidden * shape.shared_ffn * tokens
    flops = {
        "core_attn": attention_flops(shape, tokens),
        "mlp": shape.dense_layers * 6 * shape.hidden * shape.ffn * tokens,
        "moe": experts + shared,
        "shared_experts": 0.0 if "moe" in modules else shared,
    }
    of_layers = forward_flops(shape, tokens) - 2 * shape.vocabulary * shape.hidden * tokens
    return sum(flops.get(name, 0.0) for name in modules) / of_layers


def mlp_gradients(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Return the bytes of the gradients of a gated MLP's two inner tensors and their product, at mean width."""
    sparse = 1 - shape.dense_layers / shape.layers
    width = (1 - sparse) * shape.ffn + sparse * (shape.experts_per_token * shape.expert_ffn + shape.shared_ffn)
    return 3 * width * batch.tokens * item_bytes(config) / parallel_dims(config).tp


def training_activations(config: Config, shape: ModelShape, stage: int) -> tuple[int, int]:
    """Return the bytes (device, host) at the start of a stage's backward pass, where memory peaks."""
    parallel, batch = config.policy.megatron_cfg, own_part(config, training=True)
    dims = parallel_dims(config)
    layer = layer_bytes(config, shape, batch)
    layers, in_flight = dims.stage_layers(shape.layers)[stage] // dims.chunks, dims.chunks_in_flight(stage)
    hidden = hidden_bytes(config, shape, batch)
    kept = kept_activations(config, shape, batch, layers)
    head = 2 * hidden + head_bytes(config, shape, batch) if stage == dims.pp - 1 else 0.0
    waiting = 0.0
    if parallel.fine_grained_activation_offloading:
        # The last layer's inputs stay on the device, as the backward pass needs them first.
        parts = [part for module in parallel.offload_modules or () for part in _FUSED.get(module, (module,))]
        parts = [part for part in parts if part not in recomputed_modules(parallel)]
        chosen = parallel.activation_offload_fraction * sum(layer[part] for part in parts)
        waiting = (layers * in_flight - 1) * chosen
    # After the head, a layer's gradients take about as many bytes as its activations. A recomputed layer has both at
    # once, mostly the gradients of its MLP.
    at_once = recomputed_at_once(config, layers)
    working = max(1, at_once) * sum(layer.values()) + (mlp_gradients(config, shape, batch) if at_once else 0.0)
    working += copied_bytes(config, shape, batch, training=True)
    device = in_flight * kept - waiting + max(head, working)
    return int(device), int(waiting)


def logprob_activations(config: Config, shape: ModelShape, stage: int) -> int:
    """Return the peak bytes of logprob inference on a pipeline stage."""
    batch = own_part(config, training=False)
    working = sum(layer_bytes(config, shape, batch).values()) + copied_bytes(config, shape, batch, training=False)
    if stage < parallel_dims(config).pp - 1:
        return int(working)
    return int(max(slice_logits(config, shape, batch) * (item_bytes(config) + 4), working))


def copied_bytes(config: Config, shape: ModelShape, batch: MicroBatch, training: bool) -> float:
    """Return the bytes of a layer's copies of keys and values of shared prompts. Training adds gradients, of which one
    is also in float32."""
    item = item_bytes(config)
    each = (
        batch.tokens * key_copies(config, shape, training) * shape.kv_heads * shape.head_dim / parallel_dims(config).tp
    )
    return each * (4 * item + 4 if training else 2 * item)


def slice_logits(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Return the number of logits in memory at a time (`policy/vocab_chunks.py`)."""
    return batch.tokens * min(VOCABULARY_SLICE, shape.vocabulary / parallel_dims(config).tp)


def head_bytes(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Return the LM head's bytes at the start of the backward pass.

    They are a slice's float32 logits and their gradient, the gradients of hidden states (float32) and of the head's
    matrix, and kept logits.
    """
    item = item_bytes(config)
    matrix = item * shape.hidden * shape.vocabulary / parallel_dims(config).tp
    kept = kept_logits(config, shape, batch) if keeps_logits(config.policy) else 0.0
    return slice_logits(config, shape, batch) * (4 + item) + batch.tokens * shape.hidden * 4 + matrix + kept


def kept_logits(config: Config, shape: ModelShape, batch: MicroBatch) -> float:
    """Return the bytes of a micro-batch's logits on one rank."""
    return batch.tokens * item_bytes(config) * shape.vocabulary / parallel_dims(config).tp


@dataclass(frozen=True)
class Bytes:
    """Bytes on a rank's device and in host memory."""

    device: int = 0
    host: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host)


Prediction = Mapping[tuple[Phase, Component], Bytes]


def predict(config: Config, shape: ModelShape, device_bytes: int | None) -> dict[tuple[Phase, Component], Bytes]:
    """Predict every phase and component of `Residency.of(config)` after the first step, on the pipeline stage with the
    highest peak. `planning.budget` adds contexts, refit buffers and reference weights.

    Raises:
        ValueError: an engine shares a GPU, and `device_bytes` is None.
    """
    residency = Residency.of(config)
    stages = [_of_stage(config, shape, residency, device_bytes, stage) for stage in range(parallel_dims(config).pp)]
    return max(stages, key=lambda stage: max(sums.device for sums in totals(stage).values()))


def totals(prediction: Prediction) -> dict[Phase, Bytes]:
    sums: dict[Phase, Bytes] = {}
    for (phase, _), nbytes in prediction.items():
        sums[phase] = sums.get(phase, Bytes()) + nbytes
    return sums


def predicted_metrics(prediction: Prediction) -> dict[str, float]:
    """Return bytes on the device as metrics `memory/predicted/<phase>/<component>`."""
    return {
        f"memory/predicted/{phase}/{component}": float(nbytes.device)
        for (phase, component), nbytes in prediction.items()
    }


def _of_stage(
    config: Config, shape: ModelShape, residency: Residency, device_bytes: int | None, stage: int
) -> dict[tuple[Phase, Component], Bytes]:
    dims, peft = parallel_dims(config), config.policy.megatron_cfg.peft
    trained = trained_parameters(shape, dims, peft, stage, grouped=on_gpus(config))
    held = rank_parameters(shape, dims, stage).total + (trained.total if peft.enabled else 0)
    sizes = {
        Component.PARAMETERS: held * item_bytes(config) - shared_weights(config, shape, stage),
        Component.GRADIENTS: trained.total * gradient_bytes(config),
    }
    of_teachers = teacher_weight_bytes(config) if has_teacher(config) else []
    if residency.engines_share_device:
        weights = engine_weights(config, shape)
        sizes[Component.GENERATION_WEIGHTS] = weights
        token_bytes = token_cache_bytes(config, shape)
        sizes[Component.KV_CACHE] = engine_of(config).kv_bytes(config, token_bytes, weights, device_bytes)

    def cell(phase: Phase, component: Component) -> Bytes:
        place = residency.place(phase, component)
        if component is Component.OPTIMIZER_STATES:
            return _optimizer_states(config, trained, place)
        if component is Component.ACTIVATIONS:
            return _activations(config, shape, trained, phase, stage)
        if component is Component.TEACHER_WEIGHTS:
            if not config.teacher.offload:
                return _at(place, sum(of_teachers))
            # Copies in host memory are permanent. One teacher at a time is on the device.
            return Bytes(host=sum(of_teachers)) + _at(place, max(of_teachers), moved=False)
        return _at(place, sizes[component])

    return {
        (phase, component): cell(phase, component) for phase in residency.phases for component in residency.components
    }


def _at(place: Place, nbytes: int, moved: bool = True) -> Bytes:
    """Return bytes at a place. Host bytes count only if they are `moved`."""
    match place:
        case Place.DEVICE:
            return Bytes(device=nbytes)
        case Place.HOST:
            return Bytes(host=nbytes if moved else 0)
        case Place.RELEASED:
            return Bytes()


def _activations(config: Config, shape: ModelShape, trained: Parameters, phase: Phase, stage: int) -> Bytes:
    training = Bytes(*training_activations(config, shape, stage))
    if phase is Phase.TRAIN:
        # A step of Transformer Engine's Adam copies 16-bit moments to float32. It begins when activations are free,
        # except those of a captured pass.
        copies = 4 * (_narrow_moments(config) or 0) * _stepped(config, trained)
        device = training.device + copies if records_training(config) else max(training.device, copies)
        return Bytes(device, training.host)
    # A captured training pass keeps its memory in all phases.
    kept = training if records_training(config) else Bytes()
    if phase is not Phase.LOGPROB:
        return kept
    own = logprob_activations(config, shape, stage)
    # Teacher and policy compute logprobs sequentially.
    return kept + Bytes(max(own, teacher_activation_bytes(config)) if has_teacher(config) else own)


def _optimizer_states(config: Config, parameters: Parameters, place: Place) -> Bytes:
    """Return the bytes of master weights (float32, unless parameters are) and of the optimizer's moments."""
    settings, held = config.policy.megatron_cfg.optimizer, _stepped(config, parameters)
    masters = 4 if config.policy.precision == "bfloat16" else 0
    past = 8 if settings.optimizer == "adam" else 4 if settings.sgd_momentum > 0 else 0
    if (narrow := _narrow_moments(config)) is not None:
        # Master weights are the lower 16 bits of float32 values, whose upper 16 bits are the weights.
        masters, past = 2, 8 - 2 * narrow
    whole = held * (masters + past)
    if not settings.optimizer_cpu_offload:
        return _at(place, whole)
    away = settings.optimizer_offload_fraction
    # The CPU optimizer keeps float32 copies of the parameters and gradients that it steps.
    return Bytes(device=int((1 - away) * whole), host=int(away * held * (4 + gradient_bytes(config) + past)))


def _narrow_moments(config: Config) -> int | None:
    """Count the moments of 16 bits; None without the precision-aware optimizer."""
    own = config.policy.megatron_cfg.optimizer
    if not own.use_precision_aware_optimizer or own.optimizer_cpu_offload or not on_gpus(config):
        return None
    return [own.exp_avg_dtype, own.exp_avg_sq_dtype].count("bfloat16")


def _stepped(config: Config, parameters: Parameters) -> int:
    """Count the parameters that a rank's optimizer steps."""
    if not config.policy.megatron_cfg.optimizer.use_distributed_optimizer:
        return parameters.total
    dims = parallel_dims(config)
    return ceil(parameters.dense / dims.dense_dp) + ceil(parameters.experts / dims.expert_dp)


def engine_weights(config: Config, shape: ModelShape) -> int:
    """Return the bytes of weights, served adapters and a draft's weights on one of an engine's devices."""
    serves = engines_serve_adapters(config.generation, config.policy)
    adapters = served_adapters(shape, config.policy.megatron_cfg.peft) if serves else 0
    draft = _draft(config, shape)
    more = adapters * item_bytes(config) + (draft.weight_bytes if draft else 0)
    return engine_parameters(config, shape) * item_bytes(config) + more // engine_ranks(config)


def engine_parameters(config: Config, shape: ModelShape) -> int:
    """Count the parameters on one of an engine's devices. Each tensor-parallel rank has all matrices that compress for
    latent attention."""
    whole = shape.layers * attention_weights(shape)[1]
    split = (parameter_count(shape) - whole) // engine_ranks(config)
    return split + whole // config.generation.vllm_cfg.pipeline_parallel_size


def shared_weights(config: Config, shape: ModelShape, stage: int) -> int:
    """Return the bytes of a policy rank's frozen weights in the memory of the engine on its GPU; 0 if the two split
    matrices differently."""
    dims, own = parallel_dims(config), config.generation.vllm_cfg
    same = dims.tp == own.tensor_parallel_size and dims.pp == own.pipeline_parallel_size
    if not engines_share_weights(config) or not same:
        return 0
    return (rank_parameters(shape, dims, stage).total - unlike_the_engine(shape, dims, stage)) * item_bytes(config)


def token_cache_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes of a token in the KV cache of one of an engine's GPUs, with that of a draft."""
    settings, draft = config.generation.vllm_cfg, _draft(config, shape)
    ranks = settings.tensor_parallel_size
    layers = -(-shape.layers // settings.pipeline_parallel_size)
    of_layer = -(-shape.kv_heads // ranks) * (shape.head_dim + shape.value_dim)
    if shape.latent and engine_of(config).caches_latents:
        # On CPUs vLLM pads values to the width of keys.
        of_layer = shape.latent.cached if on_gpus(config) else 2 * -(-shape.kv_heads // ranks) * shape.head_dim
    elements = layers * of_layer
    if draft is not None:
        is_own = (speculation(config.generation) or {}).get("model") is None
        elements += draft.layers * (of_layer if is_own else 2 * -(-draft.kv_heads // ranks) * draft.head_dim)
    return elements * item_bytes(config)


def _draft(config: Config, shape: ModelShape) -> DraftShape | None:
    """Return the sizes of the engines' draft; None without one, or if they are unknown."""
    if not generates(config) or not has_draft_model(config.generation):
        return None
    name = (speculation(config.generation) or {}).get("model")
    if name is not None:
        return _draft_of(name)
    layers = own_draft_layers(config.policy.model_name)
    if not layers:
        return None
    fewer = replace(shape, layers=shape.layers - 1, dense_layers=min(shape.dense_layers, shape.layers - 1))
    one = parameter_count(shape) - parameter_count(fewer)
    # Each of these layers also projects an embedding and a hidden state.
    weights = layers * (one + 2 * shape.hidden**2) * item_bytes(config)
    return DraftShape(layers, shape.kv_heads, shape.head_dim, weights)


_draft_of = cache(draft_shape)


def teacher_shape(config: Config) -> ModelShape | None:
    """Return the teacher's architecture; None without a teacher or, with a warning, if it is unknown."""
    return _shape(config.teacher.model_name or "") if has_teacher(config) else None


def teacher_weight_bytes(config: Config) -> list[int]:
    """Return the largest bytes of weights on a rank, of each teacher; 0 for an unknown architecture."""
    own = as_teacher(config)
    dims = parallel_dims(own)
    return [
        0
        if (shape := teacher_shape(one)) is None
        else max(rank_parameters(shape, dims, stage).total for stage in range(dims.pp)) * item_bytes(own)
        for one in teacher_configs(config).values()
    ]


def teacher_activation_bytes(config: Config) -> int:
    """Return the peak bytes of a teacher's pass over a micro-batch, including top-k logits."""
    own = as_teacher(config)
    # A float32 logit and an int64 id.
    top = 12 * (teacher_topk(config) or 0) * micro_batch(own, training=False).tokens
    shapes = filter(None, map(teacher_shape, teacher_configs(config).values()))
    return max((logprob_activations(own, shape, parallel_dims(own).pp - 1) + top for shape in shapes), default=0)


@cache
def _shape(name: str) -> ModelShape | None:
    try:
        return find_shape(name)
    except NoModelError as error:
        log.warning("the teacher's memory and time are not predicted: %s", error)
        return None


@dataclass(frozen=True)
class DecodingBytes:
    """Bytes that an engine's GPU reads per decoding step."""

    step: float
    """Weights of all matrices and experts: sequences of a batch together use nearly all experts."""
    token: float
    """Bytes per token in the KV caches."""

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> "DecodingBytes":
        weights = matrix_weights(shape, shape.experts) * item_bytes(config)
        return cls(weights / engine_ranks(config), token_cache_bytes(config, shape))
