"""Values of the command line that are allowed and hardly ever meant: of another unit, or for another definition of the
key. They are told, and not refused."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nemo_rl_lite.config.leaves import leaves
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.host.stopping import seconds
from nemo_rl_lite.rules.layout import MEGATRON

_OPTIMIZER = f"{MEGATRON}.optimizer"
_BETAS = f"{_OPTIMIZER}.adam_beta1", f"{_OPTIMIZER}.adam_beta2"
_MINUTE, _DAY = 60, 86400
# What a phase of a step may wait for.
_WAITS = ("reward.timeout_s", "environment.timeout_s", "agent.timeout_s", "refit.timeout_s")


@dataclass(frozen=True)
class Slip:
    """A key with a number, which of its values are odd, and what such a value means."""

    key: str
    is_odd: Callable[[float], bool]
    meaning: str


SLIPS = (
    Slip(f"{_OPTIMIZER}.lr", lambda value: value >= 0.1, "an optimizer step moves each weight by about that much"),
    Slip(f"{_OPTIMIZER}.adam_eps", lambda value: value >= 1e-3, "larger than most gradients, which it then divides"),
    Slip(f"{_OPTIMIZER}.weight_decay", lambda value: value >= 10, "a usual weight decay is at most 0.1"),
    Slip(
        "algorithm.loss_fn.ratio_clip_min",
        lambda value: value >= 0.5,
        "it is subtracted from 1, so that the importance ratio is clipped far below 1; 0.2 clips at 0.8",
    ),
    Slip(
        "algorithm.loss_fn.ratio_clip_max",
        lambda value: value >= 1,
        "it is added to 1, so that the importance ratio is clipped at 2 or more; 0.28 clips at 1.28",
    ),
    Slip(
        "algorithm.loss_fn.reference_policy_kl_penalty",
        lambda value: value >= 1,
        "the KL outweighs rewards between 0 and 1, and the policy stays at the reference",
    ),
    Slip("generation.temperature", lambda value: value < 0.1, "the responses to a prompt will hardly differ"),
    Slip("refit.bucket_bytes", lambda value: value < 2**16, "a bucket's size is in bytes, and small ones are slow"),
)


def slips(config: Config, given: Sequence[str]) -> Iterator[str]:
    """Yield what to say about values that the command gives, whose keys are `given`."""
    values = dict(leaves(dataclasses.asdict(config)))
    numbers = {key: values[key] for key in given if isinstance(values.get(key), int | float)}
    for slip in SLIPS:
        if slip.key in numbers and slip.is_odd(numbers[slip.key]):
            yield f"{slip.key} = {numbers[slip.key]:g}: {slip.meaning}"
    if not numbers.keys().isdisjoint(_BETAS) and values[_BETAS[0]] > values[_BETAS[1]]:
        yield f"{_BETAS[0]} = {values[_BETAS[0]]} exceeds {_BETAS[1]} = {values[_BETAS[1]]}, usually the larger one"
    phase = config.cluster.phase_timeout_s
    for key, value in numbers.items():
        if key.endswith("timeout_s") and value > _DAY:
            yield f"{key} = {value:g}: the key is in seconds, and these are {value / _DAY:.3g} days"
        elif key in _WAITS and phase is not None and value >= phase:
            yield f"{key} = {value:g}: cluster.phase_timeout_s = {phase:g} may end the run before"
    limit = seconds(config.checkpoint.must_save_by)
    if "checkpoint.must_save_by" in given and limit is not None and limit < 15 * _MINUTE:
        rule = f"the run saves and stops {limit / _MINUTE:.3g} minutes after the command"
        yield f"checkpoint.must_save_by = {config.checkpoint.must_save_by}: {rule}"
