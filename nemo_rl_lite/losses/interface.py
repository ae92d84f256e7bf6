"""The protocol of losses, and how shares of one add up. Shapes: B sequences, T tokens.

Every micro-batch is divided by counts of the *global* batch, so that the sum over micro-batches and data-parallel ranks
is the loss, however the batch was split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.errors import TrainingError
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
    """The needs that `loss` declares."""
    return frozenset(getattr(loss, "needs", ()))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the positions where `mask` is not 0. A selection, not a product: NaN elsewhere does not enter."""
    return torch.where(mask > 0, values, 0.0).sum()


def masked_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The same for each sequence, [B]."""
    return torch.where(mask_BT > 0, values_BT, 0.0).sum(dim=1)


def mean_over_tokens(values: Tensor, mask_BT: Tensor, counts: Normalizers) -> Tensor:
    """This micro-batch's share of a mean over the tokens of the global batch, of values that broadcast to [B, T]."""
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
    """Metrics of micro-batches or ranks -> of the whole: minima and maxima of `*_min` and `*_max`, sums of the rest."""

    def combined(name: str) -> float:
        values = [part[name] for part in parts]
        if not name.endswith(("_min", "_max")):
            return sum(values)
        # The comparisons of min and max would lose a NaN, or keep it, by its place in the list.
        extreme = min if name.endswith("_min") else max
        return math.nan if any(map(math.isnan, values)) else extreme(values)

    return {name: combined(name) for name in parts[0]}


def summary(loss: Loss, shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics to log of a global batch, from those of all its shares."""
    return getattr(loss, "summarize", dict)(combine_metrics(shares))
