"""Predicts the step time of GRPO on GPUs, for each split of the GPUs between engines and policy.

The policy takes the FLOPs of `planning/memory.py` at `MFU` of the peak. Recomputing activations adds a forward pass of
the layers. A layer takes at least `LAUNCH_S` per pass over a micro-batch, to launch its kernels. Engines read weights
once per decoding step and each request's KV cache once per token, at `READS` of the memory bandwidth. If the tokens'
FLOPs take longer, they count instead. The engines' overhead is added.

Replicas on several hosts reduce gradients and gather weights once per optimizer step; overlapped, only what exceeds the
passes counts.

The constants fit the records of docs/benchmarks/plan-time-against-measured. Not predicted: offload moves, FP8, other
communication between ranks, environments, rewards, agents and resampled prompts.
"""

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace

from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.engines import engine_of, engines_quantize, engines_sleep
from nemo_rl_lite.config.keys import flatten, parse_override
from nemo_rl_lite.config.overrides import given_keys
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig, RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import (
    all_gpus,
    as_teacher,
    batch_mode,
    engine_ranks,
    engines,
    generates_ahead,
    generation_gpus,
    leaving_for_generation,
    on_gpus,
    optimizer_steps,
    parallel_dims,
    policy_ranks,
    previous_passes,
    samples_per_step,
    sequences_per_optimizer_step,
    spans_hosts,
    with_overlap,
)
from nemo_rl_lite.config.sources import teacher_configs
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.automatic import resolve_auto
from nemo_rl_lite.planning.budget import Gpu, budget, merges_adapters, refit_bytes, speed_of
from nemo_rl_lite.planning.memory import (
    SequenceFlops,
    forward_flops,
    gradient_bytes,
    item_bytes,
    matrix_weights,
    micro_batch,
    parameter_count,
    recomputed_share,
    siblings_per_pack,
    teacher_shape,
    token_cache_bytes,
    trained_parameters,
)
from nemo_rl_lite.validation.algorithm import corrects_staleness
from nemo_rl_lite.validation.compose import compose_config

# Achieved shares of peak FLOP/s and memory bandwidth.
MFU, READS = 0.5, 0.78
# Minimum time of a layer's forward or backward pass over a micro-batch.
LAUNCH_S = 4.5e-3
# Overhead of an engine per decoding step, token and request.
ENGINE_STEP_S, TOKEN_S, REQUEST_S = 1e-3, 1.5e-5, 5e-4
# Time of a CPU optimizer step per parameter of a rank.
CPU_OPTIMIZER_S = 8e-10
# Fixed time of a refit and its check: non-colocated engines, colocated engines that wake up, and colocated engines that
# stay awake.
REFIT_APART_S, REFIT_WAKING_S, REFIT_AWAKE_S = 0.2, 0.35, 0.1
# Bytes/s of a refit: on one machine, and over a link of 400 Gb/s between machines.
RATE_INSIDE, RATE_BETWEEN = 1e11, 5e10
# Predictions that differ by less than this share count as equal.
CLOSE = 0.1
HEADERS = ["engine GPUs", "policy GPUs", "generation", "logprob", "train", "refit", "sync", "one step off"]
_COLOCATED, _SOURCE, _LOSS = "generation.colocated", "algorithm.rollouts.source", "algorithm.loss_fn"
_RESOURCES = [f"{_COLOCATED}.resources.{name}" for name in ("num_nodes", "gpus_per_node")]
_CORRECTED = [f"{_LOSS}.use_importance_sampling_correction=true", f"{_LOSS}.truncated_importance_sampling_ratio=2"]


@dataclass(frozen=True)
class Lengths:
    """Tokens of a step's sequences. `prompt`: mean, with an environment's turns; `mean`, `longest`: responses."""

    prompt: float
    mean: float
    longest: float


@dataclass(frozen=True)
class StepTime:
    """Time of the phases of a step, in seconds."""

    generation: float
    logprob: float
    train: float
    refit: float

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
        """Time of a step that trains while the engines generate the next rollout."""
        return max(self.generation, self.policy) + self.refit


def assumed_lengths(config: Config, mean: float | None = None) -> Lengths:
    """Assume lengths before a run. Responses have half of `max_new_tokens` without `mean`, the longest has all, and
    prompts have half of the remaining length."""
    longest = config.generation.max_new_tokens
    room = max(2, config.policy.max_total_sequence_length - longest)
    return Lengths(room / 2, longest / 2 if mean is None else mean, longest)


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
    if spans_hosts(config):
        exchanged = exchange_seconds(config, shape)
        overlap = with_overlap(config).policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce
        seconds += max(0.0, exchanged - seconds) if overlap else exchanged
    if parallel.optimizer.optimizer_cpu_offload:
        trained = trained_parameters(shape, dims, parallel.peft, 0, on_gpus(config)).total
        seconds += parallel.optimizer.optimizer_offload_fraction * trained / dims.dense_dp * CPU_OPTIMIZER_S
    return seconds


def exchange_seconds(config: Config, shape: ModelShape) -> float:
    """Return the time in which replicas on several hosts reduce gradients and gather weights, per optimizer step."""
    dims, peft = parallel_dims(config), config.policy.megatron_cfg.peft
    stages = range(dims.pp)
    trained = max(trained_parameters(shape, dims, peft, stage, on_gpus(config)).total for stage in stages)
    return trained * (gradient_bytes(config) + item_bytes(config)) / RATE_BETWEEN


def generation_seconds(config: Config, shape: ModelShape, gpu: Gpu, gpu_bytes: int, lengths: Lengths) -> float:
    """Return the time to sample the responses of a step. A prompt is prefilled once for all its samples."""
    item, wide = item_bytes(config), engine_ranks(config)
    weights, token_bytes = parameter_count(shape) * item // wide, token_cache_bytes(config, shape)
    cache = engine_of(config).kv_bytes(config, token_bytes, weights, gpu_bytes)
    room = min(config.generation.vllm_cfg.max_num_seqs, int(cache / (token_bytes * (lengths.prompt + lengths.mean))))
    requests = -(-samples_per_step(config) // engines(config))
    # Requests without room in the cache wait.
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
    """Return the time of the policy's forward (and in training backward) passes over `sequences`."""
    parallel, dims = config.policy.megatron_cfg, parallel_dims(config)
    padded = batch_mode(config.policy, on_gpus(config)) == "fixed"
    length = lengths.prompt + (lengths.longest if padded else lengths.mean)
    batch, share = micro_batch(config, training), sequences / dims.dp
    # A packed micro-batch has as many sequences as fit, a padded one has its rows.
    skipped = 1 - 1 / siblings_per_pack(config, lengths.prompt, lengths.mean, training)
    tokens = length - skipped * lengths.prompt
    count = math.ceil(share / (batch.tokens // batch.row if padded else batch.tokens / tokens))
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
    launches = 1 + again + (1 if training else 0)
    flops = max(stages) * share / count / (dims.tp * dims.cp)
    each = max(flops / (MFU * gpu.flops), launches * max(layers) * LAUNCH_S)
    if dims.chunks > 1:
        count = -(-count // dims.pp) * dims.pp
    # Filling the pipeline takes a pass per further stage, of one model chunk.
    return (count + (dims.pp - 1) / dims.chunks) * each


@dataclass(frozen=True)
class GpuSplit:
    """A split of a run's GPUs. Colocated GPUs count for both sides."""

    engine_gpus: int
    policy_gpus: int
    colocated: bool
    overlaps: bool = False
    """True: engines generate while the policy trains."""
    time: StepTime | None = None
    """None if the split is invalid or does not fit."""
    refusal: str = ""
    overrides: Sequence[str] = ()
    """Overrides to add to the command."""
    instead_of: Sequence[str] = ()
    """Overrides to remove from the command."""

    @property
    def seconds(self) -> float:
        """Step time; infinite if refused. For colocated engines that overlap, an upper limit."""
        if self.time is None:
            return math.inf
        return self.time.overlapped if self.overlaps and not self.colocated else self.time.synchronous


@dataclass(frozen=True)
class GpuSplits:
    """Splits of the GPUs of `config`, composed from `overrides`. Non-colocated engines generate one step ahead."""

    config: Config
    overrides: Sequence[str]
    shape: ModelShape
    gpu_bytes: int
    lengths: Lengths

    def present(self) -> GpuSplit:
        """Return the configured split."""
        return self._predicted(self.config)

    def others(self, present: GpuSplit) -> Iterator[GpuSplit]:
        """Yield the colocated split, and each number of engine GPUs, or engine machines if there are several."""
        nodes, total = self.config.cluster.num_nodes, all_gpus(self.config)
        if not present.colocated:
            wanted = [f"{_COLOCATED}.enabled=true", f"{_SOURCE}=on_policy"]
            yield self._first([wanted, [*wanted, "offload=pinned"]], GpuSplit(total, total, colocated=True))
        by_node, by_gpu = _RESOURCES
        key, other, count = (by_node, by_gpu, nodes) if nodes > 1 else (by_gpu, by_node, total)
        options, ahead = self.config.options(GRPOConfig), []
        if not generates_ahead(self.config):
            corrects = options.loss is not None or corrects_staleness(options.loss_fn)
            ahead = [f"{_SOURCE}=one_step_off", *([] if corrects else _CORRECTED)]
        # A non-colocated policy makes no room for engines.
        makes_room = leaving_for_generation(self.config.policy)
        for number in range(1, count):
            wanted = [f"{_COLOCATED}.enabled=false", f"{key}={number}", f"{other}=null", *ahead]
            ways = [[*wanted, "offload=none"], [*wanted, "policy.offload_for_generation=[]"]]
            split = GpuSplit(number * total // count, total - number * total // count, colocated=False)
            yield self._first(ways if makes_room else [wanted], split)

    def _first(self, ways: Sequence[Sequence[str]], split: GpuSplit) -> GpuSplit:
        """Return the split with the first valid overrides that fit."""
        reasons, values = [], dict(flatten(asdict(self.config)))
        for wanted in ways:
            parsed = zip(wanted, map(parse_override, wanted), strict=True)
            # Omit keys that already have the value.
            changes = [text for text, one in parsed if one and values.get(one.key_or_group, text) != one.value()]
            # Colocated engines have no separate GPUs.
            replaced = {*given_keys(changes), *(_RESOURCES if split.colocated else [])}
            gone = [one for one in self.overrides if replaced & {*given_keys([one])}]
            try:
                config = compose_config([*(one for one in self.overrides if one not in gone), *changes])
            except ConfigError as error:
                reasons.append(f"{error.violations[0].key} {error.violations[0].rule}")
                continue
            if budget(resolve_auto(config, self.shape, self.gpu_bytes).config, self.shape, self.gpu_bytes).fits_device:
                return replace(self._predicted(config), overrides=changes, instead_of=gone)
            reasons.append("the GPUs' memory is too small")
        return replace(split, refusal=reasons[0])

    def _predicted(self, config: Config) -> GpuSplit:
        chosen = resolve_auto(config, self.shape, self.gpu_bytes).config
        time = predict_step(chosen, self.shape, self.gpu_bytes, self.lengths)
        colocated = config.generation.colocated.enabled
        return GpuSplit(generation_gpus(config), policy_ranks(config), colocated, generates_ahead(config), time)


def rows(present: GpuSplit, others: Sequence[GpuSplit]) -> list[list[str]]:
    """Return a row of times for each split; `now` marks the configured one."""
    table = []
    others = [one for one in others if one.engine_gpus != present.engine_gpus]
    for one in sorted([present, *others], key=lambda one: (not one.colocated, one.engine_gpus)):
        gpus = [f"{'all ' if one.colocated else ''}{one.engine_gpus}{' (now)' if one is present else ''}"]
        gpus.append("the same" if one.colocated else str(one.policy_gpus))
        if one.time is None:
            table.append([*gpus, *["-"] * 5, "refused, see below"])
        else:
            overlapped = "-" if one.colocated else _seconds(one.time.overlapped)
            table.append([*gpus, *map(_seconds, [*astuple(one.time), one.time.synchronous]), overlapped])
    return table


def lines(present: GpuSplit, others: Sequence[GpuSplit]) -> Iterator[str]:
    """Yield sentences about idle time, refused splits, and the overrides of the shortest step."""
    if present.time is not None:
        time, now = present.time, f"now: a step takes {_seconds(present.seconds)} s"
        if present.colocated:
            how = "concurrently" if present.overlaps else "alternately"
            yield f"{now}{' at most' * present.overlaps}; engines and policy work {how} on the same GPUs"
        else:
            late = time.generation - time.policy
            waits = (max(late, 0), max(-late, 0)) if present.overlaps else (time.generation, time.policy)
            own, theirs = map(_seconds, waits)
            yield f"{now}; the policy waits {own} s for the engines, and the engines wait {theirs} s for the policy"
    for key in dict.fromkeys(one.refusal.split()[0] for one in others if one.refusal):
        alike = [one for one in others if one.refusal.startswith(f"{key} ")]
        numbers = ", ".join(str(one.engine_gpus) for one in alike)
        first = f"; with {alike[0].engine_gpus}" if len(alike) > 1 else ""
        yield f"refused with {numbers} of the GPUs for engines{first}: {alike[0].refusal}"
    shortest = min([present, *others], key=lambda one: one.seconds)
    if not others:
        yield "one GPU cannot be split"
    elif shortest.seconds >= (1 - CLOSE) * present.seconds:
        yield f"no other split shortens the step by {CLOSE:.0%} or more"
    else:
        apart = f"{shortest.engine_gpus} GPUs for engines, which generate while the policy trains"
        how = "colocated engines" if shortest.colocated else apart
        yield f"shortest step: {_seconds(shortest.seconds)} s with {how}; overrides:"
        yield shlex.join(shortest.overrides)
        if shortest.instead_of:
            yield f"instead of: {shlex.join(shortest.instead_of)}"


def _seconds(seconds: float) -> str:
    """Return `0.43`, `4.3` or `43`."""
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
