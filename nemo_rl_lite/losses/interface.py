"""Protocol and factory of losses, and sums of their metrics. Shapes: B sequences, T tokens.

Each micro-batch divides by counts of the *global* batch. So the loss is the sum over micro-batches and data-parallel
ranks, and independent of the split.
"""

import inspect
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.config.schema_algorithm import AlgorithmConfig
from nemo_rl_lite.config.user_code import imported, own_name
from nemo_rl_lite.errors import ConfigError, TrainingError, Violation
from nemo_rl_lite.losses.batch import Batch, CountedRows, RowBatch, TokenRow, TokenRows, trained_of_episodes

Metrics = dict[str, Tensor]
Need = Literal["entropy", "topk_logits", "student_topk_logprobs"]


@dataclass(frozen=True)
class Normalizers:
    """Counts over the global batch: tokens with a loss, and sequences with such tokens. The rows of an episode count as
    one sequence."""

    tokens: float
    sequences: float
    tokens_by_age: Mapping[int, int] = field(default_factory=dict)
    """Tokens by staleness (`TokenRow.ages`)."""
    own: Mapping[str, float] = field(default_factory=dict)
    """Other numbers that a loss needs in each step. CUDA graphs require the rest of a loss to be constant."""


def count_masked(rows: Sequence[TokenRow]) -> Normalizers:
    """Count the rows' tokens and sequences; both are at least 1."""
    rows = rows if isinstance(rows, CountedRows) else TokenRows.of(rows)
    if isinstance(rows, CountedRows):
        by_age = rows.tokens_by_age
    else:
        ages, counts = np.unique(() if rows.ages is None else rows.ages[rows.mask], return_counts=True)
        by_age = {int(age): count for age, count in zip(ages, counts.tolist(), strict=True)}
    trained, _ = trained_of_episodes(rows)
    tokens, sequences = float(trained.sum()), float(np.count_nonzero(trained))
    return Normalizers(max(tokens, 1.0), max(sequences, 1.0), by_age)


class Loss(Protocol):
    """Objective of a policy, pickled and sent to the workers. Six attributes are optional:

    - `needs`, a set of `Need`: policy outputs in addition to logprobs; each is a field of `Batch`.
    - `topk`, an int: the number of logits per token in `topk_logits`.
    - `summarize(metrics)`: converts sums over shares to the metrics of a global batch, such as quotients.
    - `with_mismatched_kl(kl)`: returns the loss of a batch with this KL to the reference on mismatched responses
      (`supervised.mismatched`). Supervised training measures the KL first.
    - `correction_weights(batch)`: returns the weights of policy terms for the sample files, broadcastable to [B, T].
    - `token_shares(logprobs_BT, batch, counts)`: returns the tokens' shares of a micro-batch's loss, a
      `grpo.TokenShares`. `nrl-lite why` needs it.
    """

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the global loss (scalar, with gradient) and of its metrics, `loss`
        included."""

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count the denominators of the loss of a global batch. With rollout workers, a loss that reads tokens counts
        in one of them, in a copy of itself."""


def counts_of(loss: Loss, rows: RowBatch) -> Normalizers:
    """Return `loss.counts(rows)`. Tokens of rows that are elsewhere stay there."""
    return rows.apply(loss.counts) if isinstance(rows, CountedRows) else loss.counts(rows)


def loss_of(loss: Loss, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
    """Return `loss` and metrics of one micro-batch, with a gradient if gradients are enabled. Raises TrainingError: the
    loss has no gradient, or the metrics have no `loss`."""
    value, metrics = loss(logprobs_BT, batch, counts)
    own = f"algorithm.loss: the result of {type(loss).__name__}"
    if "loss" not in metrics:
        raise TrainingError(f"{own} has no metric 'loss', which a run prints; its metrics: {', '.join(metrics)}")
    if logprobs_BT.requires_grad and not getattr(value, "requires_grad", False):
        # A loss may return a constant for a micro-batch without trained tokens.
        if batch.mask.any():
            raise TrainingError(f"{own} has no gradient (was it detached?), so nothing would be trained")
        # Other ranks wait for this rank's gradients.
        value = value + masked_sum(logprobs_BT, batch.mask)
    return value, metrics


def needs_of(loss: object) -> frozenset[Need]:
    return frozenset(getattr(loss, "needs", ()))


def make_loss(options: AlgorithmConfig) -> Loss:
    """Create the loss of a run with these options of its algorithm. Raises ConfigError: `algorithm.loss` cannot be
    imported, called with `algorithm.loss_kwargs`, or used as this algorithm's `Loss`."""
    path = options.loss or ALGORITHMS[options.name].loss
    try:
        factory = imported(path)
    except (Exception, SystemExit) as error:
        fix = "give package.module.Class or path/to/file.py:Class that can be imported, or algorithm.loss=null"
        raise _error("loss", path, f"cannot be imported: {type(error).__name__}: {error}", fix) from error
    if not callable(factory):
        raise _error("loss", path, "cannot be called", "name a class or a function that returns a loss")
    try:
        signature = inspect.signature(factory)
        signature.bind(options, **options.loss_kwargs)
        loss = factory(options, **options.loss_kwargs)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}"
        fix = f"the call is {own_name(path)}(options, **algorithm.loss_kwargs); options are the keys below `algorithm`"
        if options.loss_kwargs:
            raise _error("loss_kwargs", dict(options.loss_kwargs), f"do not fit {path}: {cause}", fix) from error
        raise _error("loss", path, f"cannot be created: {cause}", fix) from error
    _check(path, loss)
    asked = next(iter(signature.parameters.values())).annotation
    if isinstance(asked, type) and issubclass(asked, AlgorithmConfig) and not isinstance(options, asked):
        rule = f"needs {asked.__name__}, but this run has algorithm={options.name}"
        raise _error("loss", path, rule, "set that loss's algorithm, or algorithm.loss=null")
    return loss


def _check(path: str, loss: Any) -> None:
    """Raise ConfigError if `loss` is not a `Loss`."""
    fix = "see the protocol Loss in nemo_rl_lite/losses/interface.py"
    missing = [name for name in ("__call__", "counts") if not callable(getattr(loss, name, None))]
    if missing:
        raise _error("loss", path, f"returns a {type(loss).__name__} without {' and '.join(missing)}", fix)
    for name, count in (("__call__", 3), ("counts", 1)):
        try:
            inspect.signature(getattr(loss, name)).bind(*range(count))
        except TypeError as error:
            rule = f"has a {name} that cannot be called with {count} arguments: {error}"
            raise _error("loss", path, rule, fix) from None
        # A function in C has no signature.
        except ValueError:
            continue
    needs, topk = getattr(loss, "needs", ()), getattr(loss, "topk", None)
    if not isinstance(needs, Set | tuple | list) or not set(needs) <= set(get_args(Need)):
        raise _error("loss", path, f"has needs = {needs!r}", f"give a tuple of {', '.join(map(repr, get_args(Need)))}")
    if "topk_logits" in needs and (not isinstance(topk, int) or topk < 1):
        raise _error("loss", path, f"needs topk_logits but has topk = {topk!r}, not an int above 0", fix)


def _error(key: str, value: object, rule: str, fix: str) -> ConfigError:
    return ConfigError([Violation(f"algorithm.{key}", value, rule, fix)])


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the mask. Values elsewhere may be NaN."""
    return torch.where(mask > 0, values, 0.0).sum()


def masked_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum each sequence over the mask, [B]."""
    return torch.where(mask_BT > 0, values_BT, 0.0).sum(dim=1)


def mean_over_tokens(values: Tensor, mask_BT: Tensor, counts: Normalizers) -> Tensor:
    """Return this micro-batch's share of a mean over the global batch; `values` broadcast to [B, T]."""
    return masked_sum(values.float().expand_as(mask_BT), mask_BT) / counts.tokens


def floats(shares: Sequence[Metrics]) -> list[dict[str, float]]:
    """Convert the metrics of several micro-batches to numbers, synchronizing once per device."""
    values = [value.detach().reshape(()) for share in shares for value in share.values()]
    kinds: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for place, value in enumerate(values):
        kinds.setdefault(value.device, {}).setdefault(value.dtype, []).append(place)
    numbers = [math.nan] * len(values)
    for of_device in kinds.values():
        joined = torch.cat([torch.stack([values[place] for place in own]).double() for own in of_device.values()])
        for place, number in zip(chain.from_iterable(of_device.values()), joined.tolist(), strict=True):
            numbers[place] = number
    found = iter(numbers)
    return [{name: next(found) for name in share} for share in shares]


def combine_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine metrics of micro-batches or ranks: minimum of `*_min`, maximum of `*_max`, sum of others."""

    def combined(name: str) -> float:
        values = [part[name] for part in parts]
        if not name.endswith(("_min", "_max")):
            return sum(values)
        # min and max propagate NaN only from the first position.
        extreme = min if name.endswith("_min") else max
        return math.nan if any(map(math.isnan, values)) else extreme(values)

    return {name: combined(name) for name in parts[0]}


def mean_of_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average metrics over optimizer steps, but take the extremes of `*_min` and `*_max`. Skipped steps count
    only in `skipped_steps`, unless all steps were skipped."""
    taken = [step for step in steps if not step["skipped_steps"]] or steps
    means = {
        name: value if name.endswith(("_min", "_max")) else value / len(taken)
        for name, value in combine_metrics(taken).items()
    }
    return means | {"skipped_steps": sum(step["skipped_steps"] for step in steps) / len(steps)}


def summary(loss: Loss, shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics to log of a global batch from those of its shares."""
    return getattr(loss, "summarize", dict)(combine_metrics(shares))
