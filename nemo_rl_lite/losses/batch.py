"""What is trained on: rows of tokens as the driver holds and sends them, and padded batches as a loss sees them.

Shapes: B sequences, T tokens, k of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRow:
    """One sequence without padding; a list has an entry for each token."""

    tokens: Sequence[int]
    mask: Sequence[bool]
    """Whether the loss is on the token."""
    generation_logprobs: Sequence[float] | None = None
    """The engine's logprobs of the tokens that it sampled, in nats; 0 for the others."""
    advantage: float | None = None
    ages: Sequence[int] | None = None
    """Optimizer steps from the weights that sampled the token to those that the step begins with; 0 for the others."""


@dataclass(frozen=True)
class Batch:
    """B sequences, right-padded to T tokens; a field that the run does not have is None.

    Values outside the mask may be anything. `topk_logits`, `topk_ids` and `entropy` are those of the policy that is
    trained, with gradient, and are there where the loss names them in `needs`.
    """

    tokens: Tensor
    """[B, T], int64; 0 where a row is padded."""
    lengths: Tensor
    """[B], int64."""
    mask: Tensor
    """[B, T], float32: 1 on tokens that have a loss, else 0."""
    generation_logprobs: Tensor | None = None
    """[B, T]: logprobs under the engine that sampled the tokens, in nats."""
    advantages: Tensor | None = None
    """[B]."""
    ages: Tensor | None = None
    """[B, T], int64: optimizer steps from the weights that sampled the tokens to those that the step begins with."""
    previous_logprobs: Tensor | None = None
    """[B, T]: logprobs under the policy before the first optimizer step on these rows."""
    reference_logprobs: Tensor | None = None
    """[B, T]: logprobs under the weights that the run started from."""
    entropy: Tensor | None = None
    """[B, T]: entropy in nats of the distribution that token t is drawn from; entry 0 is 0."""
    topk_logits: Tensor | None = None
    """[B, T, k]: the largest logits at the sampling temperature for token t, in descending order; entry 0 is 0."""
    topk_ids: Tensor | None = None
    """[B, T, k], int64: the tokens that have them."""

    @classmethod
    def padded(cls, rows: Sequence[TokenRow]) -> "Batch":
        """The rows as tensors, padded to the longest of them."""
        lengths = [len(row.tokens) for row in rows]
        shape = (len(rows), max(lengths))
        tokens_BT, mask_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        logprobs_BT = None if rows[0].generation_logprobs is None else torch.zeros(shape)
        ages_BT = None if rows[0].ages is None else torch.zeros(shape, dtype=torch.int64)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            tokens_BT[place, :length] = torch.tensor(row.tokens)
            mask_BT[place, :length] = torch.tensor(row.mask, dtype=torch.float32)
            if logprobs_BT is not None:
                logprobs_BT[place, :length] = torch.tensor(row.generation_logprobs)
            if ages_BT is not None:
                ages_BT[place, :length] = torch.tensor(row.ages)
        advantages_B = None if rows[0].advantage is None else torch.tensor([row.advantage for row in rows])
        return cls(tokens_BT, torch.tensor(lengths), mask_BT, logprobs_BT, advantages_B, ages_BT)

    def rows(self, index: Tensor | slice, width: int | None = None) -> "Batch":
        """The rows at `index`, cut to `width` tokens."""
        return self._each(lambda values: values[index, :width] if values.dim() > 1 else values[index])

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda values: values.to(device))

    def require(self, *names: str) -> tuple[Tensor, ...]:
        """The fields of these names. Raises ValueError: one of them is None."""
        if missing := [name for name in names if getattr(self, name) is None]:
            raise ValueError(f"the loss reads {', '.join(missing)}, which this run's batches do not have")
        return tuple(getattr(self, name) for name in names)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        present = ((one.name, getattr(self, one.name)) for one in fields(self))
        return replace(self, **{name: change(values) for name, values in present if values is not None})
