"""Resolve `auto`: whether engines sleep, what leaves the GPU for them, the tokens of a micro-batch, and kept logits.

The first way that is predicted to fit the GPU is taken:

    engines stay awake, and nothing moves
    engines sleep while the policy works
    in addition, gradients, then weights, then optimizer states leave while the engines generate

Engines stay awake only if micro-batches of `ENOUGH_TOKENS` fit next to them. Micro-batches are as large as the GPU
holds, up to `MOST_TOKENS`. Both are tokens of one GPU: context-parallel ranks share larger micro-batches. Logits are
kept if there is room for them too, or if micro-batches that leave them room are at least `KEEPING_SHARE` as large.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_lite.config.engines import engine_of, engines_sleep
from nemo_rl_lite.config.schema import Config, OffloadedComponent
from nemo_rl_lite.config.sizes import (
    batch_mode,
    engine_share,
    enough_tokens,
    generates_ahead,
    leaving_for_generation,
    on_gpus,
    parallel_dims,
    records_training,
    sequences_per_optimizer_step,
    sequences_together,
    token_limits,
)
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.offload.residency import Phase, Residency
from nemo_rl_lite.planning.budget import (
    Budget,
    budget,
    chooses_share,
    last_that,
    size,
    with_first_share,
    with_more_share,
)
from nemo_rl_lite.planning.memory import kept_logits, micro_batch, own_part

# Gradients are dropped and weights are copied; optimizer states are six times as large.
CHEAPEST_FIRST: tuple[OffloadedComponent, ...] = ("gradients", "parameters", "optimizer_states")
MOST_TOKENS, GRAIN = 65536, 1024
# Predictions of a GPU's memory were up to 9 % too small (docs/benchmarks, plan-against-measured).
USED = 0.9
# With kept logits and somewhat smaller micro-batches training took 4 % less time (docs/performance.md).
KEEPING_SHARE = 0.8
# Phases whose bytes depend on the micro-batch, and the others.
WORK, AROUND = (Phase.LOGPROB, Phase.TRAIN), (Phase.GENERATE, Phase.REFIT)


@dataclass(frozen=True)
class Resolved:
    """A configuration without `auto`, and a sentence for each choice."""

    config: Config
    reasons: Sequence[str]


def resolve_auto(config: Config, shape: ModelShape | None, gpu_bytes: int | None) -> Resolved:
    """Replace `auto`. On CPUs, or without the model's shape or the GPU's size, it stays as `config.sizes` reads it."""
    if shape is None or gpu_bytes is None or not on_gpus(config):
        return Resolved(config, [])
    less = None
    for way in (with_first_share(one, shape, gpu_bytes) for one in _ways(config)):
        tokens = _most_tokens(way, shape, gpu_bytes)
        chosen, enough = _with_tokens(way, tokens), min(enough_tokens(way.policy), _most_useful(way))
        wanted = budget(_with_tokens(way, max(tokens, enough)), shape, gpu_bytes)
        if _fits(wanted, AROUND) and (engines_sleep(way) or _fits(wanted, WORK)):
            break
        less = less or wanted
    if chooses_share(config):
        chosen = with_more_share(chosen, shape, gpu_bytes, USED)
    about_logits = []
    if config.policy.megatron_cfg.keep_logits == "auto":
        chosen, reason = _with_kept_logits(chosen, config, shape, gpu_bytes)
        about_logits = [reason]
    reasons, mode = list(_moves(config, chosen, less)), batch_mode(config.policy, on_gpus(config))
    if chooses_share(config):
        reasons.append(f"an engine takes {engine_share(chosen.generation):.0%} of its GPU")
    if mode != "fixed" and token_limits(config.policy, mode).train_mb_tokens == "auto":
        tokens = token_limits(chosen.policy, mode).train_mb_tokens
        reasons.append(f"training micro-batches have up to {tokens:,} tokens")
    return Resolved(chosen, [*reasons, *about_logits])


def _ways(config: Config) -> Iterator[Config]:
    """Yield the choices of what sleeps and moves, from the fastest to the one that needs the least memory."""
    policy, colocated = config.policy, config.generation.colocated
    shared = Residency.of(config).engines_share_device
    sleeps = [colocated.sleep]
    if colocated.sleep == "auto":
        can_sleep = shared and engine_of(config).can_sleep
        sleeps = [False] if not can_sleep or generates_ahead(config) else [False, True]
    away = ("optimizer_states",) if policy.megatron_cfg.optimizer.optimizer_cpu_offload else ()
    # Captured passes hold the addresses of weights and gradients.
    away += ("gradients", "parameters") if records_training(config) else ()
    movable = [part for part in CHEAPEST_FIRST if part not in away]
    for sleep in sleeps:
        leaving = [leaving_for_generation(policy)]
        if policy.offload_for_generation == "auto" and shared and sleep:
            leaving = [movable[:count] for count in range(len(movable) + 1)]
        elif leaving[0] and not sleep and len(sleeps) > 1:
            # The command asks for room, which only engines that sleep need.
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
    """Return the largest micro-batch that fits, or that of one longest sequence if none does."""
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
    """Return the tokens of a replica's whole optimizer step, up to `MOST_TOKENS` for each GPU that shares them."""
    longest, together = config.policy.max_total_sequence_length, sequences_together(config)
    dims = parallel_dims(config)
    share = -(-sequences_per_optimizer_step(config) // dims.dp)
    return max(together * longest, min(MOST_TOKENS * dims.cp, share * longest))


def _with_tokens(config: Config, tokens: int) -> Config:
    """Return `config` with micro-batches of `tokens` in place of `auto`."""
    policy, mode = config.policy, batch_mode(config.policy, on_gpus(config))
    if mode == "fixed":
        return config
    limits = token_limits(policy, mode)
    wanted = {key: tokens for key in ("train_mb_tokens", "logprob_mb_tokens") if getattr(limits, key) == "auto"}
    section = "sequence_packing" if mode == "packed" else "dynamic_batching"
    return replace(config, policy=replace(policy, **{section: replace(limits, **wanted)}))


def _with_kept_logits(chosen: Config, config: Config, shape: ModelShape, gpu_bytes: int) -> tuple[Config, str]:
    """Return `chosen` with logits kept for the backward pass or not, and why. They are if they fit too, or if `config`
    leaves micro-batches to `auto` and slightly smaller ones leave room."""
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
    tokens = _most_tokens(undecided, shape, gpu_bytes)
    smaller = _with_tokens(undecided, tokens)
    if smaller != kept and tokens >= KEEPING_SHARE * micro_batch(chosen, training=True).tokens:
        return smaller, f"logits are kept for the backward pass, for which micro-batches have {tokens:,} tokens"
    needed = f"{size(max(planned.device[phase] for phase in phases))}, above {USED:.0%} of {size(gpu_bytes)}"
    return again, f"logits are computed twice, because training that keeps {nbytes} of them needs {needed}"


def _with_policy(config: Config, **values: Any) -> Config:
    return replace(config, policy=replace(config.policy, **values))


def _moves(config: Config, chosen: Config, less: Budget | None) -> Iterator[str]:
    """Yield why engines sleep and components move. `less`: the budget of the first way that does not fit."""
    given = config.generation.colocated.sleep, config.policy.offload_for_generation
    if "auto" not in given or not Residency.of(config).engines_share_device:
        return
    sleeps, parts = engines_sleep(chosen), []
    if config.generation.colocated.sleep == "auto":
        parts.append("engines sleep while the policy works" if sleeps else "engines stay awake")
    if config.policy.offload_for_generation == "auto":
        leaving = ", ".join(leaving_for_generation(chosen.policy)).replace("_", " ")
        parts.append(f"{leaving} leave the GPU while engines generate" if leaving else "nothing moves")
    name = " and ".join(parts)
    if less is not None and less.gpu_bytes is not None:
        needed = f"{size(less.device[less.fullest])} of {size(less.gpu_bytes)} in phase {less.fullest.value}"
        yield f"{name}, {'because' if sleeps else 'although'} policy and engines together need {needed}"
    else:
        yield name if sleeps else f"{name}, because policy and engines fit a GPU together"
