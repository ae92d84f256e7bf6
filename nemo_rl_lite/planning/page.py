"""A plan: what a run needs and whether it fits, as tables and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.offload.residency import Component, Phase, Residency
from nemo_rl_lite.planning import waiting as waiting_table
from nemo_rl_lite.planning.alternatives import MicroBatchLimit, largest_micro_batch, preset_budgets
from nemo_rl_lite.planning.automatic import settle
from nemo_rl_lite.planning.budget import Budget, budget, refit_bytes
from nemo_rl_lite.planning.layout import Row, batch_rows, parallel_rows, rank_rows
from nemo_rl_lite.planning.memory_table import headers, render, size, title
from nemo_rl_lite.planning.waiting import Basis, Waiting, predict_waiting

RANK_ROWS = 24


@dataclass(frozen=True)
class Plan:
    config: Config
    shape: ModelShape
    gpu: str
    """The device whose memory is planned."""
    host_bytes: int | None
    """Host memory of a machine; None if unknown."""
    budget: Budget
    micro_batch: MicroBatchLimit
    presets: dict[str, Budget | str]
    """By name; the reason where the rules refuse the preset."""
    waiting: Waiting | None
    """None without engines on GPUs."""
    automatic: Sequence[str]
    """What was settled of `auto`, a sentence each."""

    @property
    def fits(self) -> bool:
        return self.budget.fits_device and self.fits_host(self.budget)

    def fits_host(self, one: Budget) -> bool:
        return self.host_bytes is None or one.host <= self.host_bytes

    @property
    def fitting_presets(self) -> list[str]:
        there = ((name, one) for name, one in self.presets.items() if isinstance(one, Budget))
        return [name for name, one in there if one.fits_device and self.fits_host(one)]


def make_plan(
    config: Config,
    overrides: Sequence[str],
    shape: ModelShape,
    gpu: tuple[str, int],
    host_bytes: int | None,
    basis: Basis | None = None,
) -> Plan:
    """`overrides` are those that `config` was composed from; `gpu` is a name and its bytes, ignored for CPUs; the
    seconds of a step rest on `basis`, or on assumptions."""
    name, nbytes = gpu if on_gpus(config) else ("CPUs", None)
    found = settle(config, shape, nbytes)
    config, waiting = found.config, None
    if generates(config) and nbytes is not None:
        waiting = predict_waiting(config, overrides, shape, nbytes, basis or Basis.assumed(config))
    return Plan(
        config,
        shape,
        name,
        host_bytes,
        budget(config, shape, nbytes),
        largest_micro_batch(config, shape, nbytes),
        dict(preset_budgets(overrides, shape, nbytes)) if on_gpus(config) else {},
        waiting,
        found.reasons,
    )


def show(plan: Plan, console: RunConsole) -> None:
    """Print the plan as tables."""
    config, shape, one = plan.config, plan.shape, plan.budget
    console.table("layout", ["", ""], [list(row) for row in parallel_rows(config, shape)])
    if on_gpus(config):
        rows = list(rank_rows(config))
        console.table("what is where", ["", "", "policy", "generation"], rows[:RANK_ROWS])
        if len(rows) > RANK_ROWS:
            console.say(f"... and {len(rows) - RANK_ROWS} rows more")
    console.table("batches", ["", ""], [list(row) for row in _batches(plan)])
    console.table(f"{title(config, shape, one.gpu_bytes)}; {plan.gpu}", headers(_residency(plan)), _memory_rows(plan))
    for line in (*(f"auto: {reason}" for reason in plan.automatic), *_verdict(plan)):
        console.say(line)
    if plan.presets:
        console.table("offload presets", ["", "fullest phase", "GPU", "host, a machine", ""], _preset_rows(plan))
        for name, reason in plan.presets.items():
            if isinstance(reason, str):
                console.say(f"offload={name} is refused here: {reason}")
    if plan.waiting:
        console.table("seconds of a step", waiting_table.HEADERS, waiting_table.rows(plan.waiting))
        for line in waiting_table.lines(plan.waiting, config):
            console.say(line)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; sizes are in bytes."""
    one, limit = plan.budget, plan.micro_batch
    cells = {
        phase.value: {
            component.value: {"device": nbytes.device, "host": nbytes.host}
            for (where, component), nbytes in one.prediction.items()
            if where is phase
        }
        for phase in one.device
    }
    return {
        "fits": plan.fits,
        "gpu": plan.gpu,
        "gpu_bytes": one.gpu_bytes,
        "layout": dict(parallel_rows(plan.config, plan.shape)),
        "batches": dict(_batches(plan)),
        "memory": cells,
        "refit_buffers": {phase.value: nbytes for phase, nbytes in one.buffers.items()},
        "overhead": one.overhead,
        "device_bytes": {phase.value: nbytes for phase, nbytes in one.device.items()},
        "fullest_phase": one.fullest.value,
        "host_bytes": one.host,
        "largest_micro_batch": {"key": limit.key, "now": limit.now, "most": limit.most},
        "presets": {
            name: {"refused": one}
            if isinstance(one, str)
            else {"device_bytes": one.device[one.fullest], "host_bytes": one.host}
            for name, one in plan.presets.items()
        },
        "presets_that_fit": plan.fitting_presets,
        "automatic": list(plan.automatic),
    } | _generation_json(plan)


def _residency(plan: Plan) -> Residency:
    return Residency.of(plan.config)


def _batches(plan: Plan) -> list[Row]:
    cache = plan.budget.prediction.get((Phase.GENERATE, Component.KV_CACHE))
    return list(batch_rows(plan.config, cache.device if cache else 0, plan.shape))


def _memory_rows(plan: Plan) -> list[list[str]]:
    one = plan.budget
    *components, _, host = render(_residency(plan), one.prediction)
    if not on_gpus(plan.config):
        return render(_residency(plan), one.prediction)
    phases = one.device
    return [
        *components,
        ["refit's buffers", *(size(nbytes) if nbytes else "-" for nbytes in one.buffers.values())],
        ["contexts, graphs, slack", *([size(one.overhead)] * len(phases))],
        ["whole GPU", *(size(nbytes) for nbytes in phases.values())],
        host,
    ]


def _verdict(plan: Plan) -> list[str]:
    one, limit = plan.budget, plan.micro_batch
    lines = []
    if one.gpu_bytes is not None:
        full = f"{size(one.device[one.fullest])} of {size(one.gpu_bytes)} in phase {one.fullest.value}"
        lines.append(f"{'fits' if one.fits_device else 'DOES NOT FIT'}: {full} on {plan.gpu}")
        most = f"{limit.most}{', all of an optimizer step' if limit.whole else ''}" if limit.most else "none fits"
        if one.engine_room < 0:
            needs = f"{size(-one.engine_room)} more of each GPU for its weights and one sequence"
            lines.append(f"an engine wants {needs}: generation.vllm_cfg.gpu_memory_utilization, tensor_parallel_size")
        lines.append(f"largest {limit.key} that trains: {most} (now {limit.now})")
    if one.host:
        there = f" of {size(plan.host_bytes)}" if plan.host_bytes is not None else ""
        for_what = ", for what leaves the GPUs and for reference weights" if on_gpus(plan.config) else ""
        word = "host memory" if plan.fits_host(one) else "HOST MEMORY DOES NOT SUFFICE"
        lines.append(f"{word}: {size(one.host)}{there} a machine{for_what}")
    if plan.waiting:
        lines.append(f"a refit: {size(refit_bytes(plan.config, plan.shape))}")
    if not plan.fits:
        others = ", ".join(f"offload={preset}" for preset in plan.fitting_presets)
        lines.append(f"would fit: {others or 'no offload preset'}")
    return lines


def _preset_rows(plan: Plan) -> list[list[str]]:
    rows = []
    for name, one in plan.presets.items():
        if isinstance(one, str):
            rows.append([name, "-", "-", "-", "refused here"])
        else:
            full = size(one.device[one.fullest])
            rows.append([name, one.fullest.value, full, size(one.host) if one.host else "-", _word(plan, one)])
    return rows


def _word(plan: Plan, one: Budget) -> str:
    if not one.fits_device:
        return "too large"
    return "fits" if plan.fits_host(one) else "host too small"


def _generation_json(plan: Plan) -> dict[str, Any]:
    if plan.waiting is None:
        return {}
    refit = {"bytes": refit_bytes(plan.config, plan.shape)}
    return {"refit": refit, "step": waiting_table.as_json(plan.waiting)}
