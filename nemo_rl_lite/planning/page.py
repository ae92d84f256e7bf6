"""Plans a run: memory, whether it fits, alternatives and step time, as tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.keys import groups
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import (
    batch_mode,
    engine_hosts,
    engine_ranks,
    engines,
    generation_gpus,
    has_agent,
    mb_tokens,
    micro_batch_sizes,
    on_gpus,
    parallel_dims,
    samples_per_step,
    sequences_per_optimizer_step,
    sequences_together,
)
from nemo_rl_lite.config.sources import source_configs
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.offload.residency import Component, Phase, Residency
from nemo_rl_lite.planning import splits
from nemo_rl_lite.planning.automatic import resolve_auto
from nemo_rl_lite.planning.budget import Budget, budget, headers, last_that, refit_bytes, render, size, speed_of, title
from nemo_rl_lite.planning.disk import DiskUse
from nemo_rl_lite.planning.lengths import assumed_lengths, shared_work
from nemo_rl_lite.planning.memory import micro_batch, token_cache_bytes
from nemo_rl_lite.planning.time import optimizer_step_seconds
from nemo_rl_lite.validation.compose import compose_config

RANK_ROWS = 24
GRAIN = 256
LAST_STAGE = "policy.megatron_cfg.num_layers_in_last_pipeline_stage"
# The share of training that a suggestion must save.
MUCH = 0.05
Row = tuple[str, str]


@dataclass(frozen=True)
class Plan:
    config: Config
    """Without `auto`."""
    given: Config
    overrides: Sequence[str]
    """The overrides of `given`."""
    shape: ModelShape
    gpu: str
    """Name of the planned device."""
    host_bytes: int | None
    """Host memory of a machine; None for no check."""
    budget: Budget
    micro_batch: "MicroBatchLimit"
    automatic: Sequence[str]
    """A sentence per resolved `auto`."""

    @property
    def fits(self) -> bool:
        return self.budget.fits_device and self.fits_host(self.budget)

    def fits_host(self, one: Budget) -> bool:
        return self.host_bytes is None or one.host <= self.host_bytes


def make_plan(
    config: Config, overrides: Sequence[str], shape: ModelShape, gpu: tuple[str, int], host_bytes: int | None
) -> Plan:
    """Plan `config`, composed from `overrides`. `gpu`: name and bytes, ignored on CPUs."""
    name, nbytes = gpu if on_gpus(config) else ("CPUs", None)
    found = resolve_auto(config, shape, nbytes, host_bytes)
    given, config = config, found.config
    limit = largest_micro_batch(config, shape, nbytes)
    return Plan(config, given, overrides, shape, name, host_bytes, budget(config, shape, nbytes), limit, found.reasons)


def show_plan(plan: Plan, console: RunConsole, mean_length: float | None = None) -> None:
    """Print the plan as tables. `mean_length`: mean tokens per response, for the step time."""
    config, shape, one = plan.config, plan.shape, plan.budget
    console.table("layout", ["", ""], [list(row) for row in parallel_rows(config, shape)])
    if on_gpus(config):
        rows = list(rank_rows(config))
        console.table("placement", ["", "", "policy", "generation"], rows[:RANK_ROWS])
        if len(rows) > RANK_ROWS:
            console.say(f"... and {len(rows) - RANK_ROWS} more rows")
    cache = one.prediction.get((Phase.GENERATE, Component.KV_CACHE))
    batches = batch_rows(config, cache.device if cache else 0, shape)
    console.table("batches", ["", ""], [list(row) for row in batches])
    residency = Residency.of(config)
    memory = render(residency, one.prediction)
    if on_gpus(config):
        *components, _, host = memory
        memory = [
            *components,
            ["refit buffers", *(size(nbytes) if nbytes else "-" for nbytes in one.buffers.values())],
            ["contexts, graphs, slack", *([size(one.overhead)] * len(one.device))],
            ["whole GPU", *(size(nbytes) for nbytes in one.device.values())],
            host,
        ]
    console.table(f"{title(config, shape, one.gpu_bytes)}; {plan.gpu}", headers(residency), memory)
    for reason in plan.automatic:
        console.say(f"auto: {reason}")
    presets = dict(preset_budgets(plan.overrides, shape, one.gpu_bytes, plan.host_bytes)) if on_gpus(config) else {}
    for line in (*_verdict(plan, presets), *_faster_stages(plan)):
        console.say(line)
    if presets:
        rows = [_preset_row(plan, name, preset) for name, preset in presets.items()]
        console.table("offload presets", ["", "peak phase", "GPU", "host, per machine", ""], rows)
        for name, reason in presets.items():
            if isinstance(reason, str):
                console.say(f"offload={name} is refused here: {reason}")
    if generates(config) and one.gpu_bytes is not None:
        _show_time(plan, one.gpu_bytes, mean_length, console)


def _show_time(plan: Plan, gpu_bytes: int, mean_length: float | None, console: RunConsole) -> None:
    config, lengths = plan.config, assumed_lengths(plan.config, mean_length)
    found = splits.GpuSplits(plan.given, plan.shape, gpu_bytes, lengths, plan.overrides, host_bytes=plan.host_bytes)
    console.table("step time in seconds", splits.HEADERS, splits.rows(found))
    said = "assumed; set --mean-length N" if mean_length is None else "from --mean-length"
    console.say(
        f"predicted at the rates of {speed_of(gpu_bytes)[0]} GPUs, for prompts of {lengths.prompt:.0f} tokens and "
        f"responses of {lengths.mean:.0f}, the longest of {lengths.longest:.0f} ({said})"
    )
    if has_agent(config) or any(one.environment.name is not None for one in source_configs(config).values()):
        console.say("time of the environment or the agent is not predicted")
    for line in splits.lines(found):
        console.say(line)


def _verdict(plan: Plan, presets: dict[str, Budget | str]) -> Iterator[str]:
    one, limit = plan.budget, plan.micro_batch
    if one.gpu_bytes is not None:
        full = f"{size(one.device[one.peak_phase])} of {size(one.gpu_bytes)} in phase {one.peak_phase.value}"
        yield f"{'fits' if one.fits_device else 'DOES NOT FIT'}: {full} on {plan.gpu}"
        most = f"{limit.most}{', a whole optimizer step' if limit.whole else ''}" if limit.most else "none fits"
        if one.engine_room < 0:
            needs = f"{size(-one.engine_room)} more of each GPU for its weights and one sequence"
            yield f"an engine needs {needs}: raise generation.vllm_cfg.gpu_memory_utilization or tensor_parallel_size"
        yield f"largest {limit.key} that trains: {most} (now {limit.now})"
    if one.host:
        there = f" of {size(plan.host_bytes)}" if plan.host_bytes is not None else ""
        for_what = ", for offloaded components and reference weights" if on_gpus(plan.config) else ""
        word = "host memory" if plan.fits_host(one) else "HOST MEMORY IS TOO SMALL"
        yield f"{word}: {size(one.host)}{there} per machine{for_what}"
    yield f"disk: {DiskUse.of(plan.config, plan.shape)}"
    if generates(plan.config) and one.gpu_bytes is not None:
        yield f"refit: {size(refit_bytes(plan.config, plan.shape))}"
    if not plan.fits:
        fitting = [name for name, preset in presets.items() if _preset_row(plan, name, preset)[-1] == "fits"]
        yield f"would fit: {', '.join(f'offload={name}' for name in fitting) or 'no offload preset'}"


def _faster_stages(plan: Plan) -> Iterator[str]:
    """Yield a line if fewer layers in the last pipeline stage fit and shorten training by `MUCH`."""
    config, dims, nbytes = plan.config, parallel_dims(plan.config), plan.budget.gpu_bytes
    if nbytes is None or dims.pp == 1 or dims.chunks > 1 or dims.first_layers or dims.last_layers:
        return
    policy, gpu, lengths = config.policy, speed_of(nbytes)[1], assumed_lengths(config)

    def seconds(own: Config) -> float:
        return optimizer_step_seconds(own, plan.shape, gpu, lengths)

    best, layers = config, plan.shape.layers
    for count in range(1, layers // dims.pp):
        parallel = replace(policy.megatron_cfg, num_layers_in_last_pipeline_stage=count)
        one = replace(config, policy=replace(policy, megatron_cfg=parallel))
        if (layers - count) % (dims.pp - 1) == 0 and seconds(one) < seconds(best):
            best = one if budget(one, plan.shape, nbytes).fits_device else best
    if (share := 1 - seconds(best) / seconds(config)) >= MUCH:
        key, count = LAST_STAGE, best.policy.megatron_cfg.num_layers_in_last_pipeline_stage
        yield f"training would take {share:.0%} less time with {key}={count}: the last stage also computes the logits"


def _preset_row(plan: Plan, name: str, one: Budget | str) -> list[str]:
    if isinstance(one, str):
        return [name, "-", "-", "-", "refused, see below"]
    word = "too large" if not one.fits_device else "fits" if plan.fits_host(one) else "host too small"
    return [name, one.peak_phase.value, size(one.device[one.peak_phase]), size(one.host) if one.host else "-", word]


@dataclass(frozen=True)
class MicroBatchLimit:
    """The largest micro-batch: `key` is `now` and fits up to `most` (0: training does not fit). `whole`: `most` is a
    rank's whole optimizer step."""

    key: str
    now: int
    most: int
    whole: bool


def largest_micro_batch(config: Config, shape: ModelShape, gpu_bytes: int | None) -> MicroBatchLimit:
    """Find the largest training micro-batch that fits the GPU."""
    policy, mode, section = config.policy, batch_mode(config.policy, on_gpus(config)), ""
    replicas, longest = parallel_dims(config).dp, policy.max_total_sequence_length
    if mode == "fixed":
        key, now = "train_micro_batch_size", micro_batch_sizes(config)[0]
        whole = policy.train_global_batch_size // replicas
        values = [value for value in range(1, whole + 1) if whole % value == 0]
    else:
        section = "sequence_packing" if mode == "packed" else "dynamic_batching"
        key, now = "train_mb_tokens", getattr(policy, section).train_mb_tokens
        whole = -(-sequences_per_optimizer_step(config) // replicas) * longest
        values = [*range(sequences_together(config) * longest, whole, GRAIN), whole]

    def fits(value: int) -> bool:
        changed: dict[str, Any] = {key: value}
        if section:
            changed = {section: replace(getattr(policy, section), **changed)}
        planned = budget(replace(config, policy=replace(policy, **changed)), shape, gpu_bytes)
        return planned.gpu_bytes is None or planned.device[Phase.TRAIN] <= planned.gpu_bytes

    most = last_that(lambda index: fits(values[index]), len(values) - 1)
    name = f"policy.{section}.{key}" if section else f"policy.{key}"
    return MicroBatchLimit(name, now, 0 if most is None else values[most], most == len(values) - 1)


def preset_budgets(
    overrides: Sequence[str], shape: ModelShape, gpu_bytes: int | None, host_bytes: int | None
) -> Iterator[tuple[str, Budget | str]]:
    """Yield each offload preset with its budget, or with the reason why it is invalid here."""
    others = [override for override in overrides if not override.startswith("offload=")]
    for preset in groups()["offload"]:
        try:
            config = compose_config([*others, f"offload={preset}"])
            yield preset, budget(resolve_auto(config, shape, gpu_bytes, host_bytes).config, shape, gpu_bytes)
        except ConfigError as error:
            first = error.violations[0]
            yield preset, f"{first.key} {first.rule}"


def parallel_rows(config: Config, shape: ModelShape) -> Iterator[Row]:
    """Yield rows about the policy's ranks, the layers of each stage, and the engines."""
    dims = parallel_dims(config)
    context = f"context {dims.cp} x " if dims.cp > 1 else ""
    sizes = f"tensor {dims.tp} x pipeline {dims.pp} x {context}data {dims.dp}"
    if shape.experts:
        sizes += f", experts over {dims.ep}"
    yield "policy", f"{dims.world} rank{'s' * (dims.world > 1)}: {sizes}"
    for stage, spans in enumerate(dims.stage_spans(shape.layers) if dims.pp > 1 else ()):
        ends = [name for name, there in (("embedding", stage == 0), ("output", stage == dims.pp - 1)) if there]
        own = f"layers {', '.join(f'{span.start} to {span.stop - 1}' for span in spans)}"
        yield f"stage {stage}", f"{', '.join([own, *ends])}: rank{_span(dims.ranks_of_stage(stage))}"
    if not generates(config):
        return
    settings, hosts = config.generation.vllm_cfg, engine_hosts(config)
    where = "colocated" if config.generation.colocated.enabled else "on separate GPUs"
    where = where if on_gpus(config) else "on CPUs"
    split = f"tensor {settings.tensor_parallel_size}"
    if settings.pipeline_parallel_size > 1:
        split += f" x pipeline {settings.pipeline_parallel_size}"
    split += ", experts spread" * settings.expert_parallel + f", {hosts} nodes each" * (hosts > 1)
    yield "engines", f"{engines(config)} of {config.generation.backend}, {split}, {where}"


def rank_rows(config: Config) -> Iterator[list[str]]:
    """Yield node, GPUs, policy rank and engine; GPUs with the same content share a row."""
    dims, a_node = parallel_dims(config), config.cluster.gpus_per_node
    wide, shared = engine_ranks(config), config.generation.colocated.enabled
    generating = generation_gpus(config) if generates(config) else 0
    first = 0 if shared else dims.world

    def holds(gpu: int) -> tuple[int, str, str]:
        policy = engine = "-"
        if gpu < dims.world:
            stage, replica = dims.stage_and_replica(gpu)
            policy = f"stage {stage}, replica {replica}"
        if first <= gpu < first + generating:
            engine = f"engine {(gpu - first) // wide}"
        return gpu // a_node, policy, engine

    for (node, policy, engine), gpus in groupby(range(config.cluster.num_nodes * a_node), holds):
        yield [f"node {node}", f"GPU{_span([gpu % a_node for gpu in gpus])}", policy, engine]


def batch_rows(config: Config, kv_bytes: int, shape: ModelShape) -> Iterator[Row]:
    """Yield rows about a step, from samples to micro-batches. `kv_bytes`: KV cache on an engine's GPU, or 0."""
    policy, replicas = config.policy, parallel_dims(config).dp
    batch, longest = sequences_per_optimizer_step(config), policy.max_total_sequence_length
    if generates(config):
        options, samples, each = config.options(RolloutAlgorithmConfig), samples_per_step(config), engines(config)
        prompts, answers = options.num_prompts_per_step, options.num_generations_per_prompt
        steps = f"{samples // batch} optimizer step{'s' * (samples > batch)}"
        yield "step", f"{prompts} prompts x {answers} responses = {samples} samples, {steps}"
        limit = config.generation.vllm_cfg.max_num_seqs
        tokens, held = config.generation.max_new_tokens, ""
        if kv_bytes and on_gpus(config):
            held = f"; the KV cache holds {kv_bytes // (token_cache_bytes(config, shape) * longest)} longest sequences"
        yield (
            "engine",
            f"{-(-samples // each)} samples of up to {tokens} tokens per turn, up to {limit} at a time{held}",
        )
    pairs = " (pairs count twice)" if sequences_together(config) > 1 else ""
    yield (
        "optimizer step",
        f"{batch} sequences{pairs} of up to {longest} tokens, {-(-batch // replicas)} per replica",
    )
    tokens, mode = micro_batch(config, training=True), batch_mode(policy, on_gpus(config))
    together, share = sequences_together(config), -(-batch // replicas)
    count = -(-share // (together * max(1, tokens.tokens // (together * longest))))
    kind = {"packed": "packed into one row", "dynamic": "padded, of similar length", "fixed": "padded"}[mode]
    ranks = parallel_dims(config).cp
    split = f", split over {ranks} context-parallel ranks" if ranks > 1 else ""
    if ranks > 1 and policy.megatron_cfg.hybrid_context_parallel:
        own = mb_tokens(policy, "packed", training=True) // ranks
        split += f"; packs of shorter sequences, up to {own} tokens, are on one rank"
        if generates(config):
            shared = shared_work(shape, assumed_lengths(config), batch, replicas, ranks, own)
            split += f"; about {shared:.0%} of the work is split"
    yield "micro-batch", f"up to {tokens.tokens} tokens, {kind}{split}; up to {count} per rank and optimizer step"


def _span(numbers: Sequence[int]) -> str:
    """Return ` 3` or `s 0-3`."""
    return f" {numbers[0]}" if len(numbers) == 1 else f"s {numbers[0]}-{numbers[-1]}"
