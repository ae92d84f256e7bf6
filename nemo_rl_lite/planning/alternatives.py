"""Search for settings that would fit: larger micro-batches, other offload presets."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_rl_lite.config.keys import groups
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import (
    batch_mode,
    micro_batch_sizes,
    on_gpus,
    parallel_dims,
    sequences_per_optimizer_step,
    sequences_together,
)
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.offload.residency import Phase
from nemo_rl_lite.planning.automatic import settle
from nemo_rl_lite.planning.budget import Budget, budget
from nemo_rl_lite.planning.search import last_that
from nemo_rl_lite.rules.compose import compose_config

GRAIN = 256


@dataclass(frozen=True)
class MicroBatchLimit:
    """`key` has the value `now` and fits up to `most`, 0 if training does not fit. `whole`: `most`
    holds everything that a rank trains on in an optimizer step."""

    key: str
    now: int
    most: int
    whole: bool


def largest_micro_batch(config: Config, shape: ModelShape, gpu_bytes: int | None) -> MicroBatchLimit:
    """Find the largest training micro-batch that fits the GPU."""
    policy, mode = config.policy, batch_mode(config.policy, on_gpus(config))
    replicas = parallel_dims(config).dp
    longest = policy.max_total_sequence_length
    if mode == "fixed":
        key, now = "train_micro_batch_size", micro_batch_sizes(config)[0]
        whole = policy.train_global_batch_size // replicas
        values = [value for value in range(1, whole + 1) if whole % value == 0]
    else:
        section = "sequence_packing" if mode == "packed" else "dynamic_batching"
        key, now = f"{section}.train_mb_tokens", getattr(policy, section).train_mb_tokens
        whole = -(-sequences_per_optimizer_step(config) // replicas) * longest
        values = [*range(sequences_together(config) * longest, whole, GRAIN), whole]

    def fits(value: int) -> bool:
        planned = budget(_with(config, key, value), shape, gpu_bytes)
        return planned.gpu_bytes is None or planned.device[Phase.TRAIN] <= planned.gpu_bytes

    most = last_that(lambda index: fits(values[index]), len(values) - 1)
    return MicroBatchLimit(f"policy.{key}", now, 0 if most is None else values[most], most == len(values) - 1)


def preset_budgets(
    overrides: Sequence[str], shape: ModelShape, gpu_bytes: int | None
) -> Iterator[tuple[str, Budget | str]]:
    """Yield each offload preset with its budget, or with the reason why the rules refuse the preset here."""
    others = [override for override in overrides if not override.startswith("offload=")]
    for preset in groups()["offload"]:
        try:
            config = compose_config([*others, f"offload={preset}"])
            yield preset, budget(settle(config, shape, gpu_bytes).config, shape, gpu_bytes)
        except ConfigError as error:
            first = error.violations[0]
            yield preset, f"{first.key} {first.rule}"


def _with(config: Config, key: str, value: int) -> Config:
    """`config` with another value of `policy.<key>`."""
    policy = config.policy
    section, _, name = key.rpartition(".")
    if section:
        part = dataclasses.replace(getattr(policy, section), **{name: value})
        return dataclasses.replace(config, policy=dataclasses.replace(policy, **{section: part}))
    return dataclasses.replace(config, policy=dataclasses.replace(policy, **{name: value}))
