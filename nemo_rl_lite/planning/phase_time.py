"""Predict the seconds of a step's phases on GPUs, from the configuration and the lengths of the sequences.

The policy takes the FLOPs of `planning/flops.py` at `MFU` of the peak, and those of its layers' forward pass once more
where it recomputes activations. A layer takes at least `LAUNCH_S` a pass over a micro-batch, in which the processor
launches its kernels. Engines read their weights once a step and each request's KV cache once a token, at `READS` of the
memory's bandwidth, or take the FLOPs of the tokens, whichever is longer; the engine's own work comes on top.

The constants were chosen from our records: docs/benchmarks, plan-time-against-measured. Not predicted: the moves of an
offload preset, communication between ranks, environments, rewards, agents, and prompts that are replaced.
"""

from dataclasses import dataclass, replace
from math import ceil

from nemo_rl_lite.config.engines import CacheFacts, engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import (
    batch_mode,
    engine_ranks,
    engines,
    on_gpus,
    parallel_dims,
    samples_per_step,
    sequences_per_optimizer_step,
)
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.activation_size import item_bytes, micro_batch
from nemo_rl_lite.planning.flops import SequenceFlops, forward_flops, matrix_weights
from nemo_rl_lite.planning.gpus import Gpu
from nemo_rl_lite.planning.model_size import parameter_count, trained_parameters
from nemo_rl_lite.planning.prediction import token_cache_bytes

# Shares of the peak FLOP/s and of the memory's bandwidth that are reached.
MFU, READS = 0.5, 0.78
# The least seconds of a layer for a forward pass over a micro-batch, and as many for a backward pass.
LAUNCH_S = 4.5e-3
# Seconds that an engine works by itself: in each of its steps, for each token, and for each request.
ENGINE_STEP_S, TOKEN_S, REQUEST_S = 1e-3, 1.5e-5, 5e-4
# Seconds that an optimizer on the CPU takes for each parameter of a rank.
CPU_OPTIMIZER_S = 8e-10


@dataclass(frozen=True)
class Lengths:
    """Tokens of a step's sequences: mean prompt (with what an environment adds), mean response, longest response."""

    prompt: float
    mean: float
    longest: float


def logprob_seconds(config: Config, shape: ModelShape, gpu: Gpu, lengths: Lengths) -> float:
    """Seconds for the logprobs of one set of weights on the samples of a step."""
    return _passes(config, shape, gpu, lengths, samples_per_step(config), training=False)


def optimizer_step_seconds(config: Config, shape: ModelShape, gpu: Gpu, lengths: Lengths) -> float:
    """Seconds of training on the sequences of one optimizer step."""
    seconds = _passes(config, shape, gpu, lengths, sequences_per_optimizer_step(config), training=True)
    parallel, dims = config.policy.megatron_cfg, parallel_dims(config)
    if parallel.optimizer.optimizer_cpu_offload:
        trained = trained_parameters(shape, dims, parallel.peft, 0, on_gpus(config)).total
        seconds += parallel.optimizer.optimizer_offload_fraction * trained / dims.dense_dp * CPU_OPTIMIZER_S
    return seconds


def generation_seconds(config: Config, shape: ModelShape, gpu: Gpu, gpu_bytes: int, lengths: Lengths) -> float:
    """Seconds in which the engines sample a step's responses. A prompt is computed once for all its samples."""
    item, wide = item_bytes(config), engine_ranks(config)
    weights, token_bytes = parameter_count(shape) * item // wide, token_cache_bytes(config, shape)
    cache = engine_of(config).kv_bytes(config, CacheFacts(token_bytes, weights, gpu_bytes))
    room = min(config.generation.vllm_cfg.max_num_seqs, int(cache / (token_bytes * (lengths.prompt + lengths.mean))))
    requests = -(-samples_per_step(config) // engines(config))
    # Requests for which there is no room wait until others end.
    waves = max(1, requests / max(1, room))
    steps = waves * lengths.mean + max(0, lengths.longest - lengths.mean)
    caches = requests * lengths.mean * (lengths.prompt + lengths.mean / 2) * token_bytes
    read = steps * matrix_weights(shape, shape.experts) * item / wide + caches
    rate = MFU * gpu.flops * wide
    samples = config.options(RolloutAlgorithmConfig).num_generations_per_prompt
    whole = lengths.prompt + lengths.mean
    prompts = requests / samples * forward_flops(shape, lengths.prompt)
    tokens = requests * lengths.mean / whole * forward_flops(shape, whole)
    own = steps * ENGINE_STEP_S + requests * (lengths.mean * TOKEN_S + REQUEST_S)
    return prompts / rate + max(read / (READS * gpu.bandwidth), tokens / rate) + own


def _passes(config: Config, shape: ModelShape, gpu: Gpu, lengths: Lengths, sequences: int, training: bool) -> float:
    """Seconds of the policy's passes over `sequences`: a forward pass, and in training the backward pass."""
    parallel, dims = config.policy.megatron_cfg, parallel_dims(config)
    padded = batch_mode(config.policy, on_gpus(config)) == "fixed"
    length = lengths.prompt + (lengths.longest if padded else lengths.mean)
    batch, share = micro_batch(config, training), sequences / dims.dp
    # A pack has as many sequences as there is room for, a padded micro-batch its rows.
    count = ceil(share / (batch.tokens // batch.row if padded else batch.tokens / length))
    again = 1 if training and parallel.activation_checkpointing else 0
    whole, matrix = (SequenceFlops(own, parallel.peft) for own in (shape, replace(shape, layers=0, dense_layers=0)))
    work, last = ((own.training if training else own.forward)(length) for own in (whole, matrix))
    of_layers = work - last + again * (whole.forward(length) - matrix.forward(length))
    # The last pipeline stage has the vocabulary's matrix in addition to its layers. The others wait for the busiest.
    layers = dims.stage_layers(shape.layers)
    stages = [of_layers * own / shape.layers for own in layers]
    stages[-1] += last
    launches = 1 + again + (1 if training else 0)
    flops = max(stages) * share / count / (dims.tp * dims.cp)
    each = max(flops / (MFU * gpu.flops), launches * max(layers) * LAUNCH_S)
    # The first micro-batch reaches the last pipeline stage when the others have worked on it.
    return (count + dims.pp - 1) * each
