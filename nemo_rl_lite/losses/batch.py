"""Training data: unpadded rows of tokens, as the driver sends them, and padded batches, as a loss reads them.

An episode is one row, or several if an agent changed its history. Shapes: B sequences, T tokens, k vocabulary entries.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor

# Fields of `TokenRow` and `TokenRows` with one entry per token.
OF_TOKENS = {
    "tokens": np.int32,
    "mask": np.bool_,
    "generation_logprobs": np.float32,
    "token_advantages": np.float32,
    "ages": np.int32,
    "teacher_logprobs": np.float32,
    "teacher_topk_logits": np.float32,
    "teacher_topk_ids": np.int32,
}
# Their types in a `Batch`.
_PADDED = OF_TOKENS | {"tokens": np.int64, "mask": np.float32, "ages": np.int64, "teacher_topk_ids": np.int64}
# Fields of `TokenRows` with one entry per row -> the field of `TokenRow`.
_OF_ROWS = {"advantages": "advantage", "rewards": "reward"}


@dataclass(frozen=True)
class TokenRow:
    """Sequence without padding; lists and arrays have one entry per token."""

    tokens: Sequence[int] | np.ndarray
    mask: Sequence[bool] | np.ndarray
    """True for tokens with a loss."""
    generation_logprobs: Sequence[float] | np.ndarray | None = None
    """Logprobs of the engine in nats; 0 for tokens that it did not sample."""
    advantage: float | None = None
    ages: Sequence[int] | np.ndarray | None = None
    """Staleness in steps: the weight version at the start of the training step minus the one that sampled the token. 0
    for tokens that were not sampled."""
    reward: float | None = None
    """Reward; in KTO, 1 for a desirable response, else 0."""
    teacher_logprobs: Sequence[float] | np.ndarray | None = None
    """Logprobs of the teacher in nats; 0 for the first token."""
    token_advantages: Sequence[float] | np.ndarray | None = None
    """Advantage of each token instead of `advantage`; 0 for tokens that were not sampled."""
    teacher_topk_logits: Sequence[Sequence[float]] | np.ndarray | None = None
    """The teacher's k largest logits for each token; 0 for the first."""
    teacher_topk_ids: Sequence[Sequence[int]] | np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    """Experts chosen by the engine for the first tokens, [tokens, layers, k], uint8 or int16; undefined in layers
    without experts."""


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """Experts that engines chose for the first tokens of B rows, without padding."""

    values: np.ndarray
    """[N, layers, k], with N tokens in total."""
    counts: np.ndarray
    """Number of tokens of each row, [B]."""

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "RoutedExperts":
        return cls(np.concatenate(rows), np.array([len(own) for own in rows], np.int64))

    def __getitem__(self, place: int) -> np.ndarray:
        end = int(self.counts[: place + 1].sum())
        return self.values[end - int(self.counts[place]) : end]

    def rows(self, index: np.ndarray | slice) -> "RoutedExperts":
        """Return the rows at `index`, in its order; consecutive rows are a view."""
        rows = np.arange(len(self.counts))[index]
        return RoutedExperts(self.values[_places(self.counts, rows)], self.counts[rows])

    def cut(self, lengths: np.ndarray) -> "RoutedExperts":
        """Return the experts of the first `lengths` tokens of each row, [B]."""
        counts = np.minimum(self.counts, lengths)
        place = np.arange(len(self.values)) - np.repeat(self.counts.cumsum() - self.counts, self.counts)
        return RoutedExperts(self.values[place < np.repeat(counts, self.counts)], counts)

    def of_layers(self, layers: Sequence[int]) -> "RoutedExperts":
        """Return the experts of these layers, in this order; consecutive layers are a view."""
        whole = range(layers[0], layers[-1] + 1)
        index: Any = slice(whole.start, whole.stop) if list(layers) == list(whole) else list(layers)
        return RoutedExperts(self.values[:, index], self.counts)


def _places(lengths: np.ndarray, rows: np.ndarray) -> Any:
    """Return the places of these rows in concatenated rows of `lengths`: a slice if the rows are consecutive."""
    starts, own = (lengths.cumsum() - lengths)[rows], lengths[rows]
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(starts[0]), int(starts[0] + own.sum()))
    return np.arange(own.sum()) + np.repeat(starts - (own.cumsum() - own), own)


@dataclass(frozen=True, eq=False)
class TokenRows(Sequence[TokenRow]):
    """Concatenated rows with N tokens in total: one array per field, None for a field that the rows lack.

    `lengths`, `advantages`, `rewards` and `episodes` are [B]; the others [N] or [N, k]. Single rows are views.
    """

    lengths: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    generation_logprobs: np.ndarray | None
    advantages: np.ndarray | None
    ages: np.ndarray | None
    rewards: np.ndarray | None = None
    token_advantages: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    teacher_topk_logits: np.ndarray | None = None
    teacher_topk_ids: np.ndarray | None = None
    routed_experts: RoutedExperts | None = None
    episodes: np.ndarray | None = None
    """See `episode_numbers`."""

    @classmethod
    def of(cls, rows: Sequence[TokenRow]) -> "TokenRows":
        if isinstance(rows, TokenRows):
            return rows
        if isinstance(rows, CountedRows):
            return rows.fetched

        def joined(name: str) -> np.ndarray:
            parts = [np.asarray(getattr(row, name), OF_TOKENS[name]) for row in rows]
            return np.concatenate(parts) if parts else np.empty(0, OF_TOKENS[name])

        present = [name for name in OF_TOKENS if rows and getattr(rows[0], name) is not None]
        own: dict[str, Any] = dict.fromkeys(OF_TOKENS) | {name: joined(name) for name in {*present, "tokens", "mask"}}
        for name, field in _OF_ROWS.items():
            there = rows and getattr(rows[0], field) is not None
            own[name] = np.array([getattr(row, field) for row in rows], np.float64) if there else None
        if rows and rows[0].routed_experts is not None:
            own["routed_experts"] = RoutedExperts.of([row.routed_experts for row in rows])  # pyrefly: ignore
        return cls(np.array([len(row.tokens) for row in rows], np.int64), **own)

    @classmethod
    def concatenated(cls, parts: Sequence["TokenRows"]) -> "TokenRows":
        """Join batches that have the same fields."""
        present = {name for name, _ in parts[0].present([one.name for one in fields(cls)])} - {"routed_experts"}
        own: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in present}
        if parts[0].routed_experts is not None:
            experts = [part.routed_experts for part in parts if part.routed_experts is not None]
            counts = np.concatenate([one.counts for one in experts])
            own["routed_experts"] = RoutedExperts(np.concatenate([one.values for one in experts]), counts)
        return replace(parts[0], **own)

    @property
    def ends(self) -> np.ndarray:
        """Return the end of each row in the arrays of tokens, [B]."""
        return self.lengths.cumsum()

    @property
    def trained(self) -> np.ndarray:
        """Number of trained tokens of each row, [B]."""
        before = np.concatenate([[0], self.mask.cumsum()])
        return before[self.ends] - before[self.ends - self.lengths]

    @property
    def advantages_N(self) -> np.ndarray | None:
        """Advantage of each token, float32, [N]; None without advantages."""
        if self.token_advantages is None and self.advantages is not None:
            return np.repeat(self.advantages.astype(np.float32), self.lengths)
        return self.token_advantages

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...

    @overload
    def __getitem__(self, index: slice) -> "TokenRows": ...

    def __getitem__(self, index: int | slice) -> "TokenRow | TokenRows":
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        place = range(len(self))[index]
        end = int(self.ends[place])
        own = slice(end - int(self.lengths[place]), end)
        found: dict[str, Any] = {_OF_ROWS[name]: float(values[place]) for name, values in self.present(_OF_ROWS)}
        found |= {name: values[own] for name, values in self.present(OF_TOKENS)}
        return TokenRow(**found, routed_experts=None if self.routed_experts is None else self.routed_experts[place])

    def select(self, index: Sequence[int]) -> "TokenRows":
        """Return the rows at `index`, in its order; consecutive rows are a view."""
        rows = np.asarray(index, np.int64)
        places = _places(self.lengths, rows)
        own = {name: values[places] for name, values in self.present(OF_TOKENS)}
        own |= {name: values[rows] for name, values in self.present(_OF_ROWS)}
        experts = None if self.routed_experts is None else self.routed_experts.rows(rows)
        episodes = None if self.episodes is None else self.episodes[rows]
        return replace(self, lengths=self.lengths[rows], **own, routed_experts=experts, episodes=episodes)

    def with_layers(self, layers: Sequence[int]) -> "TokenRows":
        """Return the rows with the routed experts of these layers only, in this order; without any, if there are no
        layers."""
        experts = self.routed_experts.of_layers(layers) if self.routed_experts is not None and layers else None
        return replace(self, routed_experts=experts)

    def present(self, names: Iterable[str]) -> Iterable[tuple[str, Any]]:
        """Return name and value of each of these fields that is not None."""
        return ((name, getattr(self, name)) for name in names if getattr(self, name) is not None)


@dataclass(frozen=True)
class SharedRows:
    """The rows of a share of a batch: references to batches elsewhere, and the index of each row in their
    concatenation."""

    parts: tuple[Any, ...]
    order: tuple[int, ...]
    scores: tuple[Any, ...] = ()
    """References to a teacher's scores of some of the rows."""
    scored: tuple[np.ndarray, ...] = ()
    """Indices of the rows of each of `scores` in the share."""


Share = tuple[Sequence[int], tuple[int, ...]]
"""Indices of rows, and the layers whose routed experts are read."""


class RowSource(Protocol):
    """Gives the rows of a `CountedRows`."""

    def share(self, shares: Sequence[Share]) -> list[SharedRows]:
        """Return references to the rows of each share, by index, with the routed experts of its layers."""
        ...

    def fetch(self, index: Sequence[int]) -> TokenRows:
        """Return the rows at `index`."""
        ...

    def apply(self, function: Callable[[TokenRows], Any], index: Sequence[int]) -> Any:
        """Return `function` of the rows at `index`, called where rows are. It is pickled."""
        ...


class _ReadError(Exception):
    """A function reads rows that are elsewhere."""


class _Unread:
    """`RowSource` of rows that cannot be read."""

    def share(self, shares: Sequence[Share]) -> list[SharedRows]:
        raise _ReadError

    def fetch(self, index: Sequence[int]) -> TokenRows:
        raise _ReadError

    def apply(self, function: Callable[[TokenRows], Any], index: Sequence[int]) -> Any:
        raise _ReadError


@dataclass(frozen=True, eq=False)
class CountedRows(Sequence[TokenRow]):
    """Rows that are elsewhere, of which this process knows the counts. Reading a row fetches it."""

    source: RowSource
    places: np.ndarray
    """Indices of the rows in the source, [B]."""
    lengths: np.ndarray
    """[B]."""
    rewards: np.ndarray
    """[B]."""
    ages: Sequence[Mapping[int, int]]
    """Number of trained tokens of each row by staleness."""
    episodes: np.ndarray | None = None
    """See `episode_numbers`."""

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...

    @overload
    def __getitem__(self, index: slice) -> "CountedRows": ...

    def __getitem__(self, index: int | slice) -> "TokenRow | CountedRows":
        if not isinstance(index, slice):
            return self.fetched[index]
        own = self.places[index], self.lengths[index], self.rewards[index], self.ages[index]
        return CountedRows(self.source, *own, None if self.episodes is None else self.episodes[index])

    @cached_property
    def fetched(self) -> TokenRows:
        """The rows."""
        return replace(self.source.fetch(self.places.tolist()), episodes=self.episodes)

    def apply(self, function: Callable[[Sequence[TokenRow]], Any]) -> Any:
        """Return `function` of the rows. If it reads a row, it is called again where rows are."""
        try:
            return function(replace(self, source=_Unread()))
        except _ReadError:
            return self.source.apply(partial(_of_episodes, function, self.episodes), self.places.tolist())

    @property
    def trained(self) -> np.ndarray:
        """Number of trained tokens of each row, [B]."""
        return np.array([sum(own.values()) for own in self.ages], np.int64)

    @property
    def tokens_by_age(self) -> dict[int, int]:
        """Number of trained tokens by staleness."""
        total = Counter[int]()
        for own in self.ages:
            total.update(own)
        return {age: total[age] for age in sorted(total)}

    def share(self, shares: Sequence[Share]) -> list[SharedRows]:
        """See `RowSource.share`."""
        return self.source.share([(self.places[list(own)].tolist(), layers) for own, layers in shares])


def _of_episodes(function: Callable[[Sequence[TokenRow]], Any], episodes: np.ndarray | None, rows: TokenRows) -> Any:
    """Return `function` of the rows of these episodes."""
    return function(replace(rows, episodes=episodes))


RowBatch = TokenRows | CountedRows
"""Rows of a batch, here or elsewhere."""


def episode_numbers(row_counts: Sequence[int]) -> np.ndarray | None:
    """Return the number of each row's episode, [B] and ascending, from the number of rows of each episode. None if each
    row is an episode."""
    if all(count == 1 for count in row_counts):
        return None
    return np.repeat(np.arange(len(row_counts)), row_counts)


def trained_of_episodes(rows: RowBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of trained tokens of each episode, and the place of each row's episode among them, [B]."""
    if rows.episodes is None:
        return rows.trained, np.arange(len(rows))
    _, places = np.unique(rows.episodes, return_inverse=True)
    return np.bincount(places, rows.trained).astype(np.int64), places


@dataclass(frozen=True)
class Batch:
    """Sequences, right-padded to T tokens. A field is None if the run lacks it.

    Values outside the mask are undefined. Rows of length 0 are padding. Logits and logprobs (in nats) are at the
    sampling temperature. `topk_logits`, `topk_ids`, `entropy` and `student_topk_logprobs` are the trained policy's,
    with gradient, and present only if the loss lists them in `needs`.
    """

    tokens: Tensor
    """Token ids [B, T], int64; 0 in the padding."""
    lengths: Tensor
    """Lengths [B], int64."""
    mask: Tensor
    """Loss mask [B, T], float32: 1 for tokens with a loss, else 0."""
    generation_logprobs: Tensor | None = None
    """Logprobs [B, T] under the engine that sampled the tokens."""
    advantages: Tensor | None = None
    """[B]; None with `token_advantages`."""
    token_advantages: Tensor | None = None
    """[B, T]; None unless `algorithm.credit=turn`."""
    ages: Tensor | None = None
    """[B, T], int64: see `TokenRow`."""
    previous_logprobs: Tensor | None = None
    """Logprobs [B, T] under the policy before the first optimizer step on these rows."""
    reference_logprobs: Tensor | None = None
    """Logprobs [B, T] under the run's starting weights."""
    entropy: Tensor | None = None
    """Entropy [B, T] in nats of the distribution of token t; entry 0 is 0."""
    topk_logits: Tensor | None = None
    """Largest logits [B, T, k] for token t, in descending order; entry 0 is 0."""
    topk_ids: Tensor | None = None
    """Tokens of `topk_logits`, [B, T, k], int64."""
    rewards: Tensor | None = None
    """[B]: see `TokenRow`."""
    teacher_logprobs: Tensor | None = None
    """[B, T]."""
    teacher_topk_logits: Tensor | None = None
    """Largest logits [B, T, k] of the teacher for token t, in descending order."""
    teacher_topk_ids: Tensor | None = None
    """Tokens of `teacher_topk_logits`, [B, T, k], int64."""
    student_topk_logprobs: Tensor | None = None
    """Logprobs [B, T, k] of `teacher_topk_ids` as token t under the trained policy; entry 0 is 0."""
    episode_tokens: Tensor | None = None
    """Tokens with a loss of all rows of the row's episode, [B]; None if each row is an episode."""

    @classmethod
    def padded(cls, rows: Sequence[TokenRow]) -> "Batch":
        """Return the rows as tensors, padded to the longest."""
        joined = TokenRows.of(rows)
        inside_BT = np.arange(joined.lengths.max()) < joined.lengths[:, None]

        def laid_out(values: np.ndarray, dtype: Any) -> Tensor:
            padded = np.zeros((*inside_BT.shape, *values.shape[1:]), dtype)
            padded[inside_BT] = values
            return torch.from_numpy(padded)

        own = {name: laid_out(values, _PADDED[name]) for name, values in joined.present(OF_TOKENS)}
        own |= {name: torch.tensor(values, dtype=torch.float32) for name, values in joined.present(_OF_ROWS)}
        return cls(lengths=torch.tensor(joined.lengths), **own)

    def rows(self, index: Tensor | slice, width: int | None = None) -> "Batch":
        """Return the rows at `index`, truncated to `width` tokens."""
        return self._each(lambda values: values[index, :width] if values.dim() > 1 else values[index])

    def padded_to(self, rows: int, width: int) -> "Batch":
        """Pad with zeros to `rows` rows, of length 0, and `width` tokens."""

        def padded(values: Tensor) -> Tensor:
            columns = (0, width - values.shape[1]) if values.dim() > 1 else ()
            return torch.nn.functional.pad(values, (*(0, 0) * (values.dim() - 2), *columns, 0, rows - len(values)))

        return self._each(padded)

    def without_loss(self, rows: list[int]) -> "Batch":
        """Return the batch with these rows cut to one token that has no loss."""
        tokens_BT, lengths, mask_BT = self.tokens.clone(), self.lengths.clone(), self.mask.clone()
        tokens_BT[rows, 1:], lengths[rows], mask_BT[rows] = 0, 1, 0.0
        return replace(self, tokens=tokens_BT, lengths=lengths, mask=mask_BT)

    def sum_over_episodes(self, values_B: Tensor) -> Tensor:
        """Sum values of rows over episodes. A row counts by its share of its episode's tokens with a loss."""
        if self.episode_tokens is None:
            return values_B.sum()
        return (values_B * self.mask.sum(dim=1) / self.episode_tokens.clamp(min=1)).sum()

    def require(self, *names: str) -> tuple[Tensor, ...]:
        """Return the fields of these names. Raises ValueError: one of them is None."""
        if missing := [name for name in names if getattr(self, name) is None]:
            raise ValueError(f"the loss reads {', '.join(missing)}, which this run's batches do not have")
        return tuple(getattr(self, name) for name in names)

    def present(self) -> dict[str, Tensor]:
        """Return the fields that are not None, by name."""
        both = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: values for name, values in both if values is not None}

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(self, **{name: change(values) for name, values in self.present().items()})
