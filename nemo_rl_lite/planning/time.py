"""Predicts the phases of a GRPO step on GPUs, in seconds.

The policy takes the FLOPs of `planning/parameters.py` at `MFU` of the peak. Recomputing activations adds a forward pass
of the layers. Each micro-batch also reads the weights and adds to the gradients, and tensor, expert and pipeline
parallel ranks exchange hidden states. LoRA's adapters read and write the inputs and outputs of their layers. A layer
takes at least `LAUNCH_S` per pass over a micro-batch, to launch its kernels. A layer with experts takes
`LAUNCH_EXPERTS_S`, and `LAUNCH_EXPERT_S` for each expert of the rank. A pipeline is as fast as its busiest stage, and
fills once per optimizer step. Replicas reduce gradients and gather weights once per optimizer step; overlapped, only
what exceeds the passes counts.

Engines read weights once per decoding step and each request's KV cache once per token, at a share of the memory
bandwidth. Samples of a prompt find part of its cache on the chip, or read it once with cascade attention. Where the
FLOPs of linear layers or of attention take longer than their bytes, they count instead. Each adapter that engines apply
takes `SERVED_ADAPTER_S` per step. The host schedules the next step meanwhile, so the slower of GPU and host counts.

The constants fit records of docs/benchmarks that `scripts/bench/plan_check.py` names; other records are held out. Not
predicted: offload moves, FP8, communication of engines and context parallel ranks, environments, rewards, agents and
resampled prompts.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nemo_rl_lite.compat.versions import KERNEL_HEAD_SIZES
from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.engines import (
    CASCADE,
    chosen_attention,
    engine_of,
    engines_quantize,
    engines_serve_adapters,
    engines_sleep,
)
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import (
    adapted_layers,
    as_teacher,
    batch_mode,
    engine_capacity,
    engine_ranks,
    engines,
    keeps_partial_rollouts,
    on_gpus,
    optimizer_steps,
    parallel_dims,
    policy_ranks,
    previous_passes,
    rollouts_in_flight,
    samples_per_step,
    samples_together,
    sequences_per_optimizer_step,
    with_overlap,
)
from nemo_rl_lite.config.sources import teacher_configs
from nemo_rl_lite.models.flops import attention_flops, forward_flops, matrix_flops, matrix_weights
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.budget import Gpu, merges_adapters, refit_bytes, speed_of
from nemo_rl_lite.planning.lengths import SIGMA, Lengths, mean_square, quantiles, slowest_replica
from nemo_rl_lite.planning.memory import (
    engine_parameters,
    gradient_bytes,
    item_bytes,
    micro_batch,
    recomputed_share,
    siblings_per_pack,
    teacher_shape,
    token_cache_bytes,
)
from nemo_rl_lite.planning.parameters import SequenceFlops, rank_parameters, trained_parameters

# Achieved shares of peak FLOP/s, and of memory bandwidth: the policy's and an engine's.
MFU, POLICY_READS, READS = 0.56, 0.78, 0.64
# The share at which the launcher's attention reads KV caches; vLLM's reads them at `READS`.
CACHE_READS = 0.85
# Minimum time of a layer's forward or backward pass over a micro-batch: without experts; with them, and for each one.
LAUNCH_S, LAUNCH_EXPERTS_S, LAUNCH_EXPERT_S = 4.5e-3, 1.7e-2, 7e-5
# An engine's host time per decoding step, token and request. vLLM's first model runner, which records experts, draws
# each request's token by a separate kernel, and takes longer per token.
ENGINE_STEP_S, TOKEN_S, TOKEN_FIRST_RUNNER_S, REQUEST_S = 2e-3, 5e-6, 6e-5, 5e-4
# Query heads that cascade attention computes for one key head and prompt (`compat/vllm_cascade.py`).
CASCADE_ROWS = 64
# Share of a prompt's reads that go to the GPU's memory; other samples have brought the rest to its cache.
PROMPT_READS = 0.45
# An engine's GPU time per token outside of matrices and attention: sampling, logprobs, small kernels and gaps. The
# launcher's kernels take less.
SAMPLE_S, OWN_SAMPLE_S = 5e-6, 2.5e-6
# How often an adapter reads or writes its layer's input and output in a forward or backward pass, and an engine's time
# per decoding step for each adapter that it applies.
ADAPTER_MOVES, SERVED_ADAPTER_S = 3.4, 1.9e-5
# Time of a CPU optimizer step per parameter of a rank.
CPU_OPTIMIZER_S = 8e-10
# Fixed time of a refit and its check: non-colocated engines, colocated engines that wake up, and colocated engines that
# stay awake.
REFIT_APART_S, REFIT_WAKING_S, REFIT_AWAKE_S = 0.2, 0.35, 0.1
# Bytes/s of a refit on one machine; of a collective on one machine; of both over 400 Gb/s between machines (assumed).
RATE_INSIDE, RATE_LINK, RATE_BETWEEN = 1e11, 3.1e11, 5e10


@dataclass(frozen=True)
class StepTime:
    """Time of the phases of a step, in seconds."""

    generation: float
    logprob: float
    train: float
    refit: float
    free: float = 0.0
    """Part of `generation` in which the engines' GPUs are free."""

    @property
    def policy(self) -> float:
        """Time for logprobs and training."""
        return self.logprob + self.train

    @property
    def synchronous(self) -> float:
        """Time of a synchronous step."""
        return self.generation + self.policy + self.refit

    @property
    def overlapped(self) -> float:
        """Time of a step that trains while engines on other GPUs generate the next rollout."""
        return max(self.generation, self.policy) + self.refit

    @property
    def contended(self) -> float:
        """Time of a step that trains while engines on the same GPUs generate the next rollout. A GPU works for one
        process at a time, so the policy overlaps with the engines only where they leave it free."""
        return self.synchronous - min(self.free, self.policy)


def predict_step(config: Config, shape: ModelShape, gpu_bytes: int, lengths: Lengths) -> StepTime:
    """Predict a step of an algorithm that generates, at the speed of the known GPU whose memory is nearest."""
    _, gpu = speed_of(gpu_bytes)
    # With several teachers, the slowest one: shares of the sources can change.
    teachers = filter(None, map(teacher_shape, teacher_configs(config).values()))
    of_teacher = max((logprob_seconds(as_teacher(config), one, gpu, lengths) for one in teachers), default=0.0)
    apart = not config.generation.colocated.enabled
    shared_s = REFIT_WAKING_S if engines_sleep(config) else REFIT_AWAKE_S
    rate = RATE_BETWEEN * refit_links(config) if apart and config.cluster.num_nodes > 1 else RATE_INSIDE
    return StepTime(
        generation_seconds(config, shape, gpu, gpu_bytes, lengths),
        (previous_passes(config) + compares(config)) * logprob_seconds(config, shape, gpu, lengths) + of_teacher,
        optimizer_steps(config) * optimizer_step_seconds(config, shape, gpu, lengths),
        (REFIT_APART_S if apart else shared_s) + refit_bytes(config, shape) / rate,
        free_seconds(config, shape, gpu, gpu_bytes, lengths),
    )


def refit_links(config: Config) -> int:
    """Return how many links carry different weights at once in a refit between machines: those of all policy GPUs, at
    most an engine's. If either side computes weights, policy rank 0 sends all of them."""
    computes = merges_adapters(config) or engines_quantize(config.generation)
    return 1 if computes else min(policy_ranks(config), engine_ranks(config))


def logprob_seconds(config: Config, shape: ModelShape, gpu: Gpu, lengths: Lengths) -> float:
    """Return the time for logprobs of a step's samples under one set of weights."""
    return _passes(config, shape, gpu, lengths, samples_per_step(config), training=False)


def optimizer_step_seconds(config: Config, shape: ModelShape, gpu: Gpu, lengths: Lengths) -> float:
    seconds = _passes(config, shape, gpu, lengths, sequences_per_optimizer_step(config), training=True)
    parallel, dims = config.policy.megatron_cfg, parallel_dims(config)
    exchanged = exchange_seconds(config, shape)
    overlap = with_overlap(config).policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce
    seconds += max(0.0, exchanged - seconds) if overlap else exchanged
    if parallel.optimizer.optimizer_cpu_offload:
        trained = trained_parameters(shape, dims, parallel.peft, 0, on_gpus(config)).total
        seconds += parallel.optimizer.optimizer_offload_fraction * trained / dims.dense_dp * CPU_OPTIMIZER_S
    return seconds


def exchange_seconds(config: Config, shape: ModelShape) -> float:
    """Return the time in which replicas reduce gradients and gather weights, per optimizer step."""
    dims, peft = parallel_dims(config), config.policy.megatron_cfg.peft
    stages = [trained_parameters(shape, dims, peft, stage, on_gpus(config)) for stage in range(dims.pp)]
    sent = max(one.dense * (1 - 1 / dims.dense_dp) + one.experts * (1 - 1 / dims.expert_dp) for one in stages)
    return sent * (gradient_bytes(config) + item_bytes(config)) / _link(config, dims.stage)


def _link(config: Config, ranks: int) -> float:
    """Return the bytes/s between `ranks` consecutive ranks."""
    return RATE_LINK if ranks <= config.cluster.gpus_per_node else RATE_BETWEEN


def generation_seconds(config: Config, shape: ModelShape, gpu: Gpu, gpu_bytes: int, lengths: Lengths) -> float:
    """Return the time to sample the responses of a step. An engine schedules the next step while its GPUs decode."""
    work = _decoding_seconds(config, shape, gpu, gpu_bytes, lengths)
    return max(work, _scheduling_seconds(config, shape, gpu_bytes, lengths))


def free_seconds(config: Config, shape: ModelShape, gpu: Gpu, gpu_bytes: int, lengths: Lengths) -> float:
    """Return the part of generation in which the engines' GPUs wait for the scheduler."""
    work = _decoding_seconds(config, shape, gpu, gpu_bytes, lengths)
    return max(0.0, _scheduling_seconds(config, shape, gpu_bytes, lengths) - work)


def _decoding_seconds(config: Config, shape: ModelShape, gpu: Gpu, gpu_bytes: int, lengths: Lengths) -> float:
    """Return the time of an engine's GPUs. It prefills a prompt once for all its samples, and an unfinished response
    again after each refit that drops its KV cache."""
    item, wide, token_bytes = item_bytes(config), engine_ranks(config), token_cache_bytes(config, shape)
    decoding = steps, requests = _decoding(config, shape, gpu_bytes, lengths)
    together = samples_together(config, lengths.prompt)
    prompt = lengths.mean * lengths.prompt * _reads_per_sample(config, shape, together)
    caches = requests * (prompt + mean_square(lengths, requests) / 2) * token_bytes
    weights = steps * matrix_weights(shape, shape.experts) * item / wide
    cache_reads = CACHE_READS if gpu.decode_kernels and _has_own_attention(config, shape) else READS
    sample_s = OWN_SAMPLE_S if gpu.decode_kernels and not _has_first_runner(config, shape) else SAMPLE_S
    reading, rate = READS * gpu.bandwidth, MFU * gpu.flops * wide
    whole = lengths.prompt + lengths.mean
    prompts = requests / together * forward_flops(shape, lengths.prompt)
    if keeps_partial_rollouts(config):
        prompts += sum(forward_flops(shape, lengths.prompt + own) for own in _unfinished(config, lengths, *decoding))
    linear = requests * matrix_flops(shape, lengths.mean)
    attention = requests * (attention_flops(shape, whole) - attention_flops(shape, lengths.prompt))
    layers = max(weights / reading, linear / rate) + max(caches / (cache_reads * gpu.bandwidth), attention / rate)
    adapters = steps * _served_adapters_seconds(config, shape)
    return prompts / rate + layers + requests * lengths.mean * sample_s + adapters


def _served_adapters_seconds(config: Config, shape: ModelShape) -> float:
    """Return the time of the adapters that engines apply, per decoding step."""
    peft = config.policy.megatron_cfg.peft
    served = engines_serve_adapters(config.generation, config.policy)
    return shape.layers * len(adapted_layers(peft, shape.linear_layers)) * SERVED_ADAPTER_S if served else 0.0


def _has_own_attention(config: Config, shape: ModelShape) -> bool:
    """Return whether engines decode by the launcher's attention (`compat/vllm_decoding.py`), on GPUs that have it."""
    options = config.generation.vllm_kwargs
    has_fp8_cache = str(options.get("kv_cache_dtype", "")).startswith("fp8")
    fits = shape.latent is None and shape.head_dim in KERNEL_HEAD_SIZES and not has_fp8_cache
    return fits and chosen_attention(options) is None


def _has_first_runner(config: Config, shape: ModelShape) -> bool:
    """Return whether engines need vLLM's first model runner, which samples by its own kernels."""
    return bool(shape.experts) and config.policy.router_replay.enabled


def _reads_per_sample(config: Config, shape: ModelShape, together: float) -> float:
    """Return how often a decoding step reads the keys and values of a prompt from memory, divided by the samples that
    an engine has `together`."""
    if chosen_attention(config.generation.vllm_kwargs) == CASCADE:
        return 1 / min(together, max(1, CASCADE_ROWS // (shape.heads // shape.kv_heads)))
    return max(1 / together, PROMPT_READS)


def _scheduling_seconds(config: Config, shape: ModelShape, gpu_bytes: int, lengths: Lengths) -> float:
    steps, requests = _decoding(config, shape, gpu_bytes, lengths)
    token_s = TOKEN_FIRST_RUNNER_S if _has_first_runner(config, shape) else TOKEN_S
    return steps * ENGINE_STEP_S + requests * (lengths.mean * token_s + REQUEST_S)


def _decoding(config: Config, shape: ModelShape, gpu_bytes: int, lengths: Lengths) -> tuple[float, int]:
    """Return the decoding steps of an engine per rollout, and its requests. Requests without room in the cache wait.

    Engines that generate for several steps at a time fill their batches, and the longest response has several times as
    long.
    """
    weights = engine_parameters(config, shape) * item_bytes(config)
    token_bytes = token_cache_bytes(config, shape)
    cache = engine_of(config).kv_bytes(config, token_bytes, weights, gpu_bytes)
    room = min(engine_capacity(config), int(cache / (token_bytes * (lengths.prompt + lengths.mean))))
    requests = -(-samples_per_step(config) // engines(config))
    waves, together = requests / max(1, room), rollouts_in_flight(config)
    if together > 1:
        return max(waves * lengths.mean, lengths.longest / together), requests
    return max(1, waves) * lengths.mean + max(0, lengths.longest - lengths.mean), requests


def _unfinished(config: Config, lengths: Lengths, steps: float, requests: int) -> Iterator[float]:
    """Yield the tokens so far of each unfinished response of an engine, when a step's rollout is complete. `steps`:
    decoding steps per rollout."""
    if lengths.mean < lengths.longest:
        responses = quantiles(requests, max(1.0, lengths.mean), SIGMA, round(lengths.longest))
        for number in range(1, rollouts_in_flight(config)):
            yield from (number * steps for one in responses if one > number * steps)


def _passes(config: Config, shape: ModelShape, gpu: Gpu, lengths: Lengths, sequences: int, training: bool) -> float:
    """Return the time of the policy's forward (and in training backward) passes over `sequences`."""
    parallel, dims = config.policy.megatron_cfg, parallel_dims(config)
    padded = batch_mode(config.policy, on_gpus(config)) == "fixed"
    length = lengths.prompt + (lengths.longest if padded else lengths.mean)
    batch, share = micro_batch(config, training), sequences / dims.dp
    # The slowest replica counts.
    share *= 1 if padded else slowest_replica(shape, lengths, sequences, dims.dp)
    # A packed micro-batch has as many sequences as fit, a padded one has its rows.
    skipped = 1 - 1 / siblings_per_pack(config, shape, lengths.prompt, lengths.mean, training)
    tokens = length - skipped * lengths.prompt
    count = math.ceil(share / (batch.tokens // batch.row if padded else batch.tokens / tokens))
    # Interleaved stages need a multiple: packs become smaller, padded micro-batches are added.
    filled = -(-count // dims.pp) * dims.pp if dims.chunks > 1 else count
    count = count if padded else filled
    again = recomputed_share(config, shape, max(dims.stage_layers(shape.layers)), length) if training else 0.0
    whole, matrix = (SequenceFlops(own, parallel.peft) for own in (shape, replace(shape, layers=0, dense_layers=0)))

    def of_row(flops: Callable[[float], float]) -> float:
        """Return the FLOPs of a sequence, with its share of a shared prompt."""
        return flops(length) - skipped * flops(lengths.prompt)

    work, last = (of_row(own.training if training else own.forward) for own in (whole, matrix))
    of_layers = work - last + again * (of_row(whole.forward) - of_row(matrix.forward))
    # The last pipeline stage also has the LM head. The slowest stage counts.
    layers = dims.stage_layers(shape.layers)
    stages = [of_layers * own / shape.layers for own in layers]
    stages[-1] += last
    passes = 1 + again + (1 if training else 0)
    flops = max(stages) * share / count / (dims.tp * dims.cp)
    moved = _moved_seconds(config, shape, share * tokens / count / dims.cp, passes)
    read = _weights_read(config, shape, training) / (POLICY_READS * gpu.bandwidth)
    sparse = 1 - shape.dense_layers / shape.layers
    experts_s = LAUNCH_EXPERTS_S + shape.experts / dims.ep * LAUNCH_EXPERT_S
    launch = (1 - sparse) * LAUNCH_S + sparse * experts_s
    adapters = passes * share * tokens / count * _adapter_bytes(config, shape) / (POLICY_READS * gpu.bandwidth)
    each = max(flops / (MFU * gpu.flops) + read + moved + adapters, passes * max(layers) * launch)
    # Filling the pipeline takes a pass per further stage, of one model chunk.
    return (filled + (dims.pp - 1) / dims.chunks) * each


def _weights_read(config: Config, shape: ModelShape, training: bool) -> int:
    """Return the bytes of weights and gradients that a rank reads and writes per micro-batch."""
    dims, item = parallel_dims(config), item_bytes(config)
    held = max(rank_parameters(shape, dims, stage).total for stage in range(dims.pp))
    if not training:
        return held * item
    trained = _most_trained(config, shape)
    # Both passes read weights. The gradient of a micro-batch is written, read, and added to the sum.
    return 2 * held * item + 2 * trained * (item + gradient_bytes(config))


def _most_trained(config: Config, shape: ModelShape) -> int:
    """Return the trained parameters of the rank that has most."""
    dims, peft = parallel_dims(config), config.policy.megatron_cfg.peft
    return max(trained_parameters(shape, dims, peft, stage, on_gpus(config)).total for stage in range(dims.pp))


def _adapter_bytes(config: Config, shape: ModelShape) -> float:
    """Return the bytes that adapters of a rank read and write per token and pass. An adapter of rank 1 has a parameter
    for each element of its layer's input and output."""
    peft = config.policy.megatron_cfg.peft
    elements = _most_trained(config, shape) / peft.dim if peft.enabled else 0.0
    return ADAPTER_MOVES * elements * item_bytes(config) / parallel_dims(config).cp


def _moved_seconds(config: Config, shape: ModelShape, tokens: float, passes: float) -> float:
    """Return the time in which ranks exchange the hidden states of a micro-batch of `tokens`.

    Tensor-parallel ranks sum each layer's attention and MLP. Expert-parallel ranks send tokens to their experts and
    back. A pipeline stage sends its output.
    """
    dims, hidden = parallel_dims(config), tokens * shape.hidden * item_bytes(config)
    layers, sparse = max(dims.stage_layers(shape.layers)), 1 - shape.dense_layers / shape.layers
    spread = dims.ep * dims.etp
    tensor = layers * 2 * 2 * (1 - 1 / dims.tp) * hidden / _link(config, dims.tp)
    # Sequence parallelism gives each tensor-parallel rank its own tokens.
    dispatched = sparse * layers * 2 * shape.experts_per_token * (1 - 1 / spread) * hidden / dims.tp
    stages = dims.chunks * hidden / _link(config, dims.world) if dims.pp > 1 else 0.0
    return passes * (tensor + dispatched / _link(config, spread) + stages)
