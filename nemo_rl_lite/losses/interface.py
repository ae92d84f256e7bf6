"""Protocol of losses, their factory, and how shares of one add up. Shapes: B sequences, T tokens.

Every micro-batch is divided by counts of the *global* batch, so that the sum over micro-batches and data-parallel ranks
is the loss, however the batch was split.
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
from nemo_rl_lite.losses.batch import Batch, TokenRow, TokenRows

Metrics = dict[str, Tensor]
Need = Literal["entropy", "topk_logits", "student_topk_logprobs"]


@dataclass(frozen=True)
class Normalizers:
    """Counts over the global batch: tokens that have a loss, and sequences that have such tokens."""

    tokens: float
    sequences: float
    tokens_by_age: Mapping[int, int] = field(default_factory=dict)
    """Tokens of each age (`TokenRow.ages`)."""
    own: Mapping[str, float] = field(default_factory=dict)
    """Extra counters and per-step numbers of the loss. The rest of a loss should be the same in each step, because CUDA
    graphs are recorded for one."""


def count_masked(rows: Sequence[TokenRow]) -> Normalizers:
    """Count `rows`; tokens and sequences are at least 1."""
    joined = TokenRows.of(rows)
    tokens = int(joined.mask.sum())
    ages, counts = np.unique(() if joined.ages is None else joined.ages[joined.mask], return_counts=True)
    before = np.concatenate([[0], joined.mask.cumsum()])
    sequences = int((before[joined.ends] > before[joined.ends - joined.lengths]).sum())
    by_age = {int(age): count for age, count in zip(ages, counts.tolist(), strict=True)}
    return Normalizers(max(float(tokens), 1.0), max(float(sequences), 1.0), by_age)


class Loss(Protocol):
    """The objective of a policy. It is pickled and sent to the workers. Four attributes are optional:

    - `needs`, a set of `Need`: outputs of the policy besides the tokens' logprobs; `Batch` has a field for each.
      `student_topk_logprobs` are of the tokens that a teacher names.
    - `topk`, an int: how many logits of each token `topk_logits` has.
    - `summarize(metrics)`: the metrics to log of a global batch, from the sums over its shares; for metrics that do not
      add up, such as a quotient of two sums.
    - `with_mismatched_kl(kl)`: the loss of a batch whose prompts, with the responses of others, have this KL to the
      reference. Supervised training measures that first.
    """

    def __call__(self, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
        """Return the loss (scalar, with gradient) of one micro-batch and its metrics, among them `loss`, each its share
        of the global batch's."""
        ...

    def counts(self, rows: Sequence[TokenRow]) -> Normalizers:
        """Count what the loss of a global batch of `rows` divides by."""
        ...


def loss_of(loss: Loss, logprobs_BT: Tensor, batch: Batch, counts: Normalizers) -> tuple[Tensor, Metrics]:
    """Call `loss` on one micro-batch; where gradients are computed, the result has one.

    Raises:
        TrainingError: the result cannot train the policy, or the metrics have no `loss`.
    """
    value, metrics = loss(logprobs_BT, batch, counts)
    own = f"algorithm.loss: what {type(loss).__name__} returns"
    if "loss" not in metrics:
        raise TrainingError(f"{own} has no metric 'loss', which a run prints; its metrics: {', '.join(metrics)}")
    if logprobs_BT.requires_grad and not getattr(value, "requires_grad", False):
        # A loss may return a constant where no token of the micro-batch is trained on.
        if batch.mask.any():
            raise TrainingError(f"{own} has no gradient (was it detached?), so that nothing would be trained")
        # Gradients of 0: other ranks wait for those of this one.
        value = value + masked_sum(logprobs_BT, batch.mask)
    return value, metrics


def needs_of(loss: object) -> frozenset[Need]:
    """Return the needs that `loss` declares."""
    return frozenset(getattr(loss, "needs", ()))


def make_loss(options: AlgorithmConfig) -> Loss:
    """Make the loss of a run with these options of its algorithm.

    Raises:
        ConfigError: `algorithm.loss` cannot be imported, called with `algorithm.loss_kwargs`, or used as a `Loss`, or
            makes another algorithm's.
    """
    path = options.loss or ALGORITHMS[options.name].loss
    try:
        factory = imported(path)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        fix = "give package.module.Class or path/to/file.py:Class that can be imported, or algorithm.loss=null"
        raise _error("loss", path, f"cannot be imported: {type(error).__name__}: {error}", fix) from error
    if not callable(factory):
        raise _error("loss", path, "cannot be called", "name a class or a function that returns a loss")
    try:
        signature = inspect.signature(factory)
        signature.bind(options, **options.loss_kwargs)
        loss = factory(options, **options.loss_kwargs)
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        cause = f"{type(error).__name__}: {error}"
        called = f"{own_name(path)}(options, **algorithm.loss_kwargs), where options are the keys below `algorithm`"
        fix = f"it is called as {called}"
        if options.loss_kwargs:
            raise _error("loss_kwargs", dict(options.loss_kwargs), f"do not fit {path}: {cause}", fix) from error
        raise _error("loss", path, f"cannot be made: {cause}", fix) from error
    _check(path, loss)
    asked = next(iter(signature.parameters.values())).annotation
    if isinstance(asked, type) and issubclass(asked, AlgorithmConfig) and not isinstance(options, asked):
        rule = f"is made from {asked.__name__}, and this run is algorithm={options.name}"
        raise _error("loss", path, rule, "set the algorithm whose loss it is, or algorithm.loss=null")
    return loss


def _check(path: str, loss: Any) -> None:
    """Raise ConfigError where `loss` is not a `Loss`."""
    fix = "see the protocol Loss in nemo_rl_lite/losses/interface.py"
    missing = [name for name in ("__call__", "counts") if not callable(getattr(loss, name, None))]
    if missing:
        raise _error("loss", path, f"makes a {type(loss).__name__} without {' and '.join(missing)}", fix)
    for name, count in (("__call__", 3), ("counts", 1)):
        try:
            inspect.signature(getattr(loss, name)).bind(*range(count))
        except TypeError as error:
            raise _error("loss", path, f"has a {name} that is called with {count} arguments: {error}", fix) from None
        except ValueError:  # a function of C code has no signature
            continue
    needs = getattr(loss, "needs", ())
    if not isinstance(needs, Set | tuple | list):
        rule, fix = f"has needs = {needs!r}, which is no tuple", f"needs = ({get_args(Need)[0]!r},), or such a tuple"
        raise _error("loss", path, rule, fix)
    if unknown := sorted(map(str, set(needs) - set(get_args(Need)))):
        raise _error("loss", path, f"needs {', '.join(unknown)}", f"a loss can need {' and '.join(get_args(Need))}")
    if not callable(summarize := getattr(loss, "summarize", dict)):
        raise _error("loss", path, f"has summarize = {summarize!r}, which cannot be called", fix)
    topk = getattr(loss, "topk", None)
    if "topk_logits" in needs and (not isinstance(topk, int) or topk < 1):
        raise _error("loss", path, f"needs topk_logits and has no int `topk` above 0, but {topk!r}", fix)


def _error(key: str, value: object, rule: str, fix: str) -> ConfigError:
    return ConfigError([Violation(f"algorithm.{key}", value, rule, fix)])


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the positions where `mask` is not 0. A selection, not a product: NaN elsewhere does not enter."""
    return torch.where(mask > 0, values, 0.0).sum()


def masked_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum each sequence over the positions where the mask is not 0, [B]."""
    return torch.where(mask_BT > 0, values_BT, 0.0).sum(dim=1)


def mean_over_tokens(values: Tensor, mask_BT: Tensor, counts: Normalizers) -> Tensor:
    """Return this micro-batch's share of a mean over the global batch's tokens; `values` broadcast to [B, T]."""
    return masked_sum(values.float().expand_as(mask_BT), mask_BT) / counts.tokens


def floats(shares: Sequence[Metrics]) -> list[dict[str, float]]:
    """Convert the metrics of several micro-batches to numbers. The host waits for their device only once."""
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
    """Combine metrics of micro-batches or ranks: minima and maxima of `*_min` and `*_max`, sums of the rest."""

    def combined(name: str) -> float:
        values = [part[name] for part in parts]
        if not name.endswith(("_min", "_max")):
            return sum(values)
        # The comparisons of min and max would lose a NaN, or keep it, by its place in the list.
        extreme = min if name.endswith("_min") else max
        return math.nan if any(map(math.isnan, values)) else extreme(values)

    return {name: combined(name) for name in parts[0]}


def mean_of_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average metrics over optimizer steps, and take minima and maxima of `*_min` and `*_max`. Steps that were skipped
    count in `skipped_steps` alone, unless all were."""
    taken = [step for step in steps if not step["skipped_steps"]] or steps
    means = {
        name: value if name.endswith(("_min", "_max")) else value / len(taken)
        for name, value in combine_metrics(taken).items()
    }
    return means | {"skipped_steps": sum(step["skipped_steps"] for step in steps) / len(steps)}


def summary(loss: Loss, shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics to log of a global batch, from those of all its shares."""
    return getattr(loss, "summarize", dict)(combine_metrics(shares))
