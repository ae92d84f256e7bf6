"""Advises a run on GPUs what would be faster, by the phases and lengths that its steps have measured."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from nemo_rl_lite.compat.versions import KERNEL_RELEASE
from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.engines import CASCADE, chosen_attention, engine_of, speculation
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.shape import ModelShape, published_shape
from nemo_rl_lite.observability.console import ENGINES_IDLE
from nemo_rl_lite.observability.environment import CONFIG_FILE, ENVIRONMENT_FILE
from nemo_rl_lite.observability.runs import read_json
from nemo_rl_lite.planning.budget import parse_size
from nemo_rl_lite.planning.lengths import Lengths
from nemo_rl_lite.planning.splits import GpuSplit, GpuSplits, described, shown_seconds
from nemo_rl_lite.planning.time import StepTime
from nemo_rl_lite.validation.compose import restore

# Numbers of measured steps that a comparison needs, after the first, and of newest ones that it uses.
FEWEST_STEPS, MOST_STEPS = 3, 20
_LENGTHS = [
    f"train/{name}" for name in ("mean_prompt_length", "mean_gen_tokens_per_sample", "max_gen_tokens_per_sample")
]
_TIMERS = [
    f"timing/train/{name}"
    for name in ("total_step_time", "generation", "policy_and_reference_logprobs", "policy_training")
]
# Part of the time of generation that cascade attention must save.
_MUCH = 0.25
History = Sequence[Mapping[str, float | None]]
"""Metrics by full name, in order of steps."""


def faster_split(config: Config, shape: ModelShape, gpu_bytes: int, steps: History) -> str | None:
    """Return a sentence on the fastest split, by the measured phases of a run on GPUs; None if it is the present one.

    `steps`: see `measured_steps`.
    """
    lengths = Lengths(*(_median(steps, name) for name in _LENGTHS))
    splits = GpuSplits(config, shape, gpu_bytes, lengths)
    seconds = [_median(steps, name) for name in (*_TIMERS, ENGINES_IDLE)]
    splits = replace(splits, measured=measured_phases(splits.present, *seconds))
    best, now = splits.best, splits.present
    if best is now:
        return None
    return (
        f"a step takes {shown_seconds(now.seconds)} s (median of {len(steps)} steps); with {described(best)} it would "
        f"take {shown_seconds(best.seconds)} s, by the measured phases: {shlex.join(best.overrides)}"
    )


def cascade_attention(config: Config, shape: ModelShape, gpu_bytes: int, steps: History) -> str | None:
    """Return a sentence on cascade attention, if it shortens the predicted generation by `_MUCH`; None otherwise.

    `steps`: see `measured_steps`.
    """
    generation, options = config.generation, config.generation.vllm_kwargs
    has_own = chosen_attention(options) or "kv_cache_dtype" in options or options.get("enable_prefix_caching") is False
    # Drafts and recorded experts need vLLM's first model runner, or several tokens per step.
    needs_other = speculation(generation) is not None or config.policy.router_replay.enabled
    if has_own or needs_other or not engine_of(config).precisions:
        return None
    lengths = Lengths(*(_median(steps, name) for name in _LENGTHS))
    with_it = replace(config, generation=replace(generation, vllm_kwargs={**options, "attention_backend": CASCADE}))
    now, then = (GpuSplits(one, shape, gpu_bytes, lengths).present.time for one in (config, with_it))
    if now is None or then is None or then.generation > (1 - _MUCH) * now.generation:
        return None
    return (
        f"prompts have {lengths.prompt:,.0f} tokens; with cascade attention generation would take about "
        f"{then.generation / now.generation:.0%} of its time: +generation.vllm_kwargs.attention_backend={CASCADE}"
    )


def measured_steps(history: History) -> History:
    """Return the newest steps with all phases and lengths; none if there are fewer than `FEWEST_STEPS`."""
    # The first step compiles kernels and captures graphs.
    steps = [one for one in history if all(one.get(name) is not None for name in (*_LENGTHS, *_TIMERS))][1:]
    return steps[-MOST_STEPS:] if len(steps) >= FEWEST_STEPS else []


def measured_phases(
    present: GpuSplit, whole: float, waits: float, logprob: float, train: float, idle: float
) -> StepTime:
    """Return the time of each phase of a run. `refit` also has all work between the phases.

    All arguments are measured seconds per step. The policy `waits` for engines, and asynchronous engines are `idle`.

    Where engines generate during training on the policy's GPUs, both slow each other down. The predicted phases of
    `present` are scaled to the measured step then.
    """
    predicted, rest = present.time or StepTime(0, 0, 0, 0), whole - waits - logprob - train
    if not present.overlaps:
        generation = waits
    elif present.colocated:
        scale = (whole - rest) / (present.seconds - predicted.refit)
        generation, logprob, train = (scale * one for one in (predicted.generation, predicted.logprob, predicted.train))
    else:
        generation = max(0.0, whole - idle - rest)
    return StepTime(generation, logprob, train, rest, generation * predicted.free / predicted.generation)


@dataclass
class Advice:
    """Tells a run once what would be faster. `config` has `auto` unresolved."""

    config: Config
    shape: ModelShape
    gpu_bytes: int
    can_cascade: bool
    _told: bool = False

    @classmethod
    def of(cls, folder: Path, shape: ModelShape | None = None) -> "Advice | None":
        """Read a run's folder. Return None for a run without rollouts or on CPUs, and if files are incomplete.

        `shape`: the model's architecture, if its name does not tell.
        """
        environment = read_json(folder / ENVIRONMENT_FILE)
        gpus = environment.get("hardware", {}).get("gpus")
        if not gpus:
            return None
        try:
            config = restore((folder / CONFIG_FILE).read_text())
        except (ConfigError, OSError):
            return None
        name = config.policy.model_name
        shape = shape or published_shape(name)
        if shape is None or not generates(config) or not on_gpus(config):
            return None
        # Lines of nvidia-smi: name, memory, driver.
        gpu_bytes = min(parse_size(line.split(",")[1]) for line in gpus)
        has_release = environment.get("versions", {}).get("vllm", "").startswith(f"{KERNEL_RELEASE}.")
        return cls(config, shape, gpu_bytes, has_release and not shape.latent)

    def news(self, history: History) -> Iterator[str]:
        """Yield the sentences of `faster_split` and `cascade_attention` as soon as enough steps are measured."""
        steps = [] if self._told else measured_steps(history)
        if steps:
            self._told = True
            split = faster_split(self.config, self.shape, self.gpu_bytes, steps)
            cascade = cascade_attention(self.config, self.shape, self.gpu_bytes, steps) if self.can_cascade else None
            yield from filter(None, [split, cascade])


def _median(steps: History, name: str) -> float:
    return median(step.get(name) or 0.0 for step in steps)
