"""Resolves `auto`: sleeping engines, offload during generation, micro-batches, kept logits, overlapped communication.

The first option that is predicted to fit the GPU is chosen:

    engines stay awake, nothing is offloaded
    engines sleep while the policy works
    in addition, gradients, then weights, then optimizer states are offloaded during generation

A later option is chosen if it is predicted to save `WORTH` of the step: its larger KV cache lets fewer requests wait.

Engines stay awake only if micro-batches of `enough_tokens` fit next to them. Micro-batches are as large as the GPU
holds, up to `MOST_TOKENS`. Both are tokens per GPU; context-parallel ranks share larger micro-batches. Those of
pipeline stages are halved while that saves `SOONER` of the predicted time. Logits are kept if they fit too, or if
micro-batches that leave room for them are at least `KEEPING_SHARE` as large.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.engines import engine_of, engines_sleep
from nemo_rl_lite.config.schema import Config, OffloadedComponent
from nemo_rl_lite.config.sizes import (
    batch_mode,
    engine_share,
    engines_may_sleep,
    enough_tokens,
    leaving_for_generation,
    on_gpus,
    parallel_dims,
    records_training,
    sequences_per_optimizer_step,
    sequences_together,
    token_limits,
    with_overlap,
)
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.offload.residency import Phase, Residency
from nemo_rl_lite.planning.budget import (
    Budget,
    budget,
    chooses_share,
    last_that,
    size,
    speed_of,
    with_first_share,
    with_more_share,
)
from nemo_rl_lite.planning.lengths import assumed_lengths
from nemo_rl_lite.planning.memory import kept_logits, micro_batch, own_part, totals
from nemo_rl_lite.planning.time import logprob_seconds, optimizer_step_seconds, predict_step

# Gradients are dropped, weights copied; optimizer states are six times as large.
CHEAPEST_FIRST: tuple[OffloadedComponent, ...] = ("gradients", "parameters", "optimizer_states")
MOST_TOKENS, GRAIN = 65536, 1024
# Margin for predictions of GPU memory that are too small (docs/benchmarks, plan-against-measured).
USED = 0.9
# The share of a pass that smaller micro-batches must save: their GEMMs are slower, which no prediction includes.
SOONER = 0.02
# Kept logits save more time than slightly larger micro-batches.
KEEPING_SHARE = 0.8
# The share of a step that more offload must save, and bytes/s between a GPU and its host, in pinned memory (assumed).
WORTH, RATE_HOST = 0.05, 2.5e10
# Phases with and without bytes that depend on the micro-batch.
WORK, AROUND = (Phase.LOGPROB, Phase.TRAIN), (Phase.GENERATE, Phase.REFIT)


@dataclass(frozen=True)
class Resolved:
    """A configuration without `auto`, and a sentence per choice."""

    config: Config
    reasons: Sequence[str]


def resolve_auto(
    config: Config, shape: ModelShape | None, gpu_bytes: int | None, host_bytes: int | None = None
) -> Resolved:
    """Replace `auto`. On CPUs, or for an unknown model or GPU, most of it stays; `config.sizes` has its values then.

    `host_bytes`: host memory of a machine, which limits offload that only saves time; None if it is unknown.
    """
    given, config = config, with_overlap(config)
    options = config.policy.megatron_cfg.distributed_data_parallel_config
    about_replicas = []
    if options.overlap_grad_reduce and given.policy.megatron_cfg.distributed_data_parallel_config != options:
        about_replicas = ["communication between replicas overlaps with training, because they are on several hosts"]
    if shape is None or gpu_bytes is None or not on_gpus(config):
        return Resolved(config, about_replicas)
    less, fitting, chosen = None, list[Config](), config
    for way in (with_first_share(one, shape, gpu_bytes) for one in _ways(config)):
        tokens = _most_tokens(way, shape, gpu_bytes)
        chosen, enough = _with_tokens(way, tokens), min(enough_tokens(way.policy), _most_useful(way))
        wanted = budget(_with_tokens(way, max(tokens, enough)), shape, gpu_bytes)
        if chooses_share(config):
            chosen = with_more_share(chosen, shape, gpu_bytes, USED)
        if _fits(wanted, AROUND) and (engines_sleep(way) or _fits(wanted, WORK)):
            fitting.append(chosen)
            if not chooses_share(config):
                break
        elif not fitting:
            less = less or wanted
    about_cache = []
    if fitting:
        chosen = _fastest(fitting, shape, gpu_bytes, host_bytes)
        if chosen is not fitting[0]:
            about_cache = ["more is offloaded than necessary, for a larger KV cache: fewer requests wait"]
    fitted, chosen = chosen, _with_pipelined_tokens(chosen, config, shape, gpu_bytes)
    fewer = micro_batch(chosen, training=True).tokens < micro_batch(fitted, training=True).tokens
    about_logits = []
    if config.policy.megatron_cfg.keep_logits == "auto":
        chosen, reason = _with_kept_logits(chosen, config, shape, gpu_bytes)
        about_logits = [reason]
    reasons, mode = list(_moves(config, chosen, less)), batch_mode(config.policy, on_gpus(config))
    if chooses_share(config):
        reasons.append(f"an engine takes {engine_share(chosen.generation):.0%} of its GPU")
    if mode != "fixed" and token_limits(config.policy, mode).train_mb_tokens == "auto":
        tokens = token_limits(chosen.policy, mode).train_mb_tokens
        why = ", so that pipeline stages wait less" if fewer else ""
        reasons.append(f"training micro-batches have up to {tokens:,} tokens{why}")
    return Resolved(chosen, [*reasons, *about_cache, *about_logits, *about_replicas])


def _fastest(fitting: Sequence[Config], shape: ModelShape, gpu_bytes: int, host_bytes: int | None) -> Config:
    """Return the first option, or one whose step is predicted to be much shorter.

    A step's time is the mean over two rollouts: responses of the assumed lengths, and responses of the maximum length.
    """
    # Awake engines are not put to sleep for a larger cache: with a queue, that would change the staleness.
    alike = [one for one in fitting if engines_sleep(one) == engines_sleep(fitting[0])]

    def seconds(config: Config) -> float:
        planned, lengths = budget(config, shape, gpu_bytes), assumed_lengths(config)
        if config is not fitting[0] and host_bytes is not None and planned.host > host_bytes:
            return math.inf
        means = lengths.mean, lengths.longest
        steps = [predict_step(config, shape, gpu_bytes, replace(lengths, mean=mean)).synchronous for mean in means]
        moved = 2 * totals(planned.prediction)[Phase.GENERATE].host / RATE_HOST
        return (fmean(steps) + moved) * (1 if config is fitting[0] else 1 + WORTH)

    return min(alike, key=seconds) if len(alike) > 1 else fitting[0]


def _ways(config: Config) -> Iterator[Config]:
    """Yield the options for sleep and offload, from the fastest to the one with the least memory."""
    policy, colocated = config.policy, config.generation.colocated
    shared = Residency.of(config).engines_share_device
    sleeps = [colocated.sleep]
    if colocated.sleep == "auto":
        can_sleep = shared and engine_of(config).can_sleep and engines_may_sleep(config)
        sleeps = [False, True] if can_sleep else [False]
    away = ("optimizer_states",) if policy.megatron_cfg.optimizer.optimizer_cpu_offload else ()
    # Captured passes hold the addresses of weights and gradients.
    away += ("gradients", "parameters") if records_training(config) else ()
    movable = [part for part in CHEAPEST_FIRST if part not in away]
    for sleep in sleeps:
        leaving = [leaving_for_generation(policy)]
        if policy.offload_for_generation == "auto" and shared and sleep:
            leaving = [movable[:count] for count in range(len(movable) + 1)]
        elif leaving[0] and not sleep and len(sleeps) > 1:
            # The command configures offload, which only sleeping engines need.
            continue
        for parts in leaving:
            yield replace(
                config,
                policy=replace(policy, offload_for_generation=list(parts)),
                generation=replace(config.generation, colocated=replace(colocated, sleep=sleep)),
            )


def _fits(planned: Budget, phases: Sequence[Phase]) -> bool:
    most = max((nbytes for phase, nbytes in planned.device.items() if phase in phases), default=0)
    return most <= USED * (planned.gpu_bytes or 0)


def _most_tokens(config: Config, shape: ModelShape, gpu_bytes: int) -> int:
    """Return the largest micro-batch that fits, at least one longest sequence."""
    least = sequences_together(config) * config.policy.max_total_sequence_length
    most = _most_useful(config)
    values = [*range(least, most, GRAIN), most]
    # A captured training pass keeps its memory in all phases.
    phases = (*WORK, *AROUND) if records_training(config) else WORK
    best = last_that(
        lambda at: _fits(budget(_with_tokens(config, values[at]), shape, gpu_bytes), phases), len(values) - 1
    )
    return values[best or 0]


def _most_useful(config: Config) -> int:
    """Return the tokens of a replica's optimizer step, up to `MOST_TOKENS` per GPU that shares them."""
    longest, together = config.policy.max_total_sequence_length, sequences_together(config)
    dims = parallel_dims(config)
    share = -(-sequences_per_optimizer_step(config) // dims.dp)
    return max(together * longest, min(MOST_TOKENS * dims.cp, share * longest))


def _with_tokens(config: Config, tokens: int) -> Config:
    """Return `config` with micro-batches of `tokens` instead of `auto`."""
    mode = batch_mode(config.policy, on_gpus(config))
    if mode == "fixed":
        return config
    limits = token_limits(config.policy, mode)
    wanted = {key: tokens for key in ("train_mb_tokens", "logprob_mb_tokens") if getattr(limits, key) == "auto"}
    return _with_limits(config, mode, **wanted)


def _with_limits(config: Config, mode: Literal["packed", "dynamic"], **tokens: int) -> Config:
    section = "sequence_packing" if mode == "packed" else "dynamic_batching"
    return _with_policy(config, **{section: replace(token_limits(config.policy, mode), **tokens)})


def _with_pipelined_tokens(chosen: Config, given: Config, shape: ModelShape, gpu_bytes: int) -> Config:
    """Return `chosen`, with smaller micro-batches where `given` has `auto` and they save time in the pipeline."""
    mode, longest = batch_mode(given.policy, on_gpus(given)), given.policy.max_total_sequence_length
    if parallel_dims(given).pp == 1 or mode == "fixed":
        return chosen
    limits, gpu = token_limits(given.policy, mode), speed_of(gpu_bytes)[1]
    lengths = assumed_lengths(given)
    passes: list[tuple[str, bool, Callable[..., float]]] = [("train_mb_tokens", True, optimizer_step_seconds)]
    passes += [("logprob_mb_tokens", False, logprob_seconds)] * generates(given)
    for key, training, predict in passes:
        while getattr(limits, key) == "auto":
            half = micro_batch(chosen, training).tokens // 2
            smaller = _with_limits(chosen, mode, **{key: half})
            if half < sequences_together(given) * longest:
                break
            if predict(smaller, shape, gpu, lengths) > (1 - SOONER) * predict(chosen, shape, gpu, lengths):
                break
            chosen = smaller
    return chosen


def _with_kept_logits(chosen: Config, config: Config, shape: ModelShape, gpu_bytes: int) -> tuple[Config, str]:
    """Return `chosen` with logits kept for the backward pass or not, and the reason. They are kept if they fit, or if
    `config` has `auto` micro-batches and slightly smaller ones leave room."""
    parallel = chosen.policy.megatron_cfg
    kept, again = (_with_policy(chosen, megatron_cfg=replace(parallel, keep_logits=keep)) for keep in (True, False))
    nbytes = size(int(kept_logits(chosen, shape, own_part(chosen, training=True))))
    planned = budget(kept, shape, gpu_bytes)
    # A captured training pass keeps its memory in all phases.
    phases = tuple(planned.device) if records_training(chosen) else (Phase.TRAIN,)
    if _fits(planned, phases):
        return kept, f"logits ({nbytes} of a micro-batch) are kept for the backward pass, because they fit"
    limits = {name: getattr(config.policy, name) for name in ("sequence_packing", "dynamic_batching")}
    undecided = _with_policy(kept, **limits)
    tokens, mode = _most_tokens(undecided, shape, gpu_bytes), batch_mode(config.policy, on_gpus(config))
    smaller = kept
    if mode != "fixed" and token_limits(config.policy, mode).train_mb_tokens == "auto":
        smaller = _with_limits(kept, mode, train_mb_tokens=tokens)
    if smaller != kept and tokens >= KEEPING_SHARE * micro_batch(chosen, training=True).tokens:
        return smaller, f"logits are kept for the backward pass, with micro-batches of {tokens:,} tokens"
    needed = f"{size(max(planned.device[phase] for phase in phases))}, above {USED:.0%} of {size(gpu_bytes)}"
    return again, f"logits are recomputed, because keeping {nbytes} of them needs {needed}"


def _with_policy(config: Config, **values: Any) -> Config:
    return replace(config, policy=replace(config.policy, **values))


def _moves(config: Config, chosen: Config, less: Budget | None) -> Iterator[str]:
    """Yield the reason for sleep and offload. `less`: budget of the first option that does not fit."""
    given = config.generation.colocated.sleep, config.policy.offload_for_generation
    if "auto" not in given or not Residency.of(config).engines_share_device:
        return
    sleeps, parts = engines_sleep(chosen), []
    if config.generation.colocated.sleep == "auto":
        parts.append("engines sleep while the policy works" if sleeps else "engines stay awake")
    if config.policy.offload_for_generation == "auto":
        leaving = ", ".join(leaving_for_generation(chosen.policy)).replace("_", " ")
        parts.append(f"{leaving} are offloaded during generation" if leaving else "nothing is offloaded")
    name = " and ".join(parts)
    if less is not None and less.gpu_bytes is not None:
        needed = f"{size(less.device[less.peak_phase])} of {size(less.gpu_bytes)} in phase {less.peak_phase.value}"
        yield f"{name}, {'because' if sleeps else 'although'} policy and awake engines need {needed}"
    else:
        yield name if sleeps else f"{name}, because policy and engines fit a GPU together"
