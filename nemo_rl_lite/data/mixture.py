"""Mixture of sources by weight: which source comes next, and a training set of several."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_rl_lite.config.sources import Weight, weight_at
from nemo_rl_lite.data.problems import Prompted, TrainingSet

# Shares are integers with this sum, so that a draw can be undone exactly.
_WHOLE = 2**32
# Share of the earlier solve rate that remains after a rollout.
_KEPT = 0.9


class Shares:
    """Chooses sources by weight, so that each has its share of the draws, up to one, at any time."""

    def __init__(self, weights: Mapping[str, Weight], state: Mapping[str, Any]):
        """`state`: from `state()` of an earlier run, which may have had other sources; empty at the start."""
        self._weights = weights
        owed, rates = state.get("owed", {}), state.get("solve_rates", {})
        self._owed: dict[str, int] = {name: owed.get(name, 0) for name in weights}
        self._rates: dict[str, float] = {name: rates[name] for name in weights if name in rates}
        self._latest: int = state.get("step", 1)
        # Draws of an earlier run are undone with its shares.
        earlier = state.get("shares", {})
        self._shares = {name: earlier.get(name, 0) for name in weights} if earlier else self._latest_shares()
        self._has_drawn = False

    def draw(self, step: int) -> str:
        """Return the source of the next prompt: the one that is owed most."""
        if step != self._latest or not self._has_drawn:
            self._latest, self._has_drawn = step, True
            self._shares = self._latest_shares()
        shares = self._shares
        for name, share in shares.items():
            self._owed[name] += share
        chosen = max((name for name in shares if shares[name]), key=self._owed.__getitem__)
        self._owed[chosen] -= _WHOLE
        return chosen

    def give_back(self, name: str) -> None:
        """Undo a draw of the latest step."""
        for other, share in self._shares.items():
            self._owed[other] -= share
        self._owed[name] += _WHOLE

    def observe(self, solve_rates: Mapping[str, float]) -> None:
        """Update the solve rates: exponential means over rollouts."""
        for name, rate in solve_rates.items():
            before = self._rates.get(name, rate)
            self._rates[name] = _KEPT * before + (1 - _KEPT) * rate
        self._shares = self._latest_shares()

    def weights(self) -> dict[str, float]:
        """Return the weights at the latest step. A source without samples counts as unsolved."""
        rates, step = self._rates, self._latest
        return {name: weight_at(own, step, rates.get(name, 0.0)) for name, own in self._weights.items()}

    def state(self) -> dict[str, Any]:
        return {
            "owed": dict(self._owed),
            "solve_rates": dict(self._rates),
            "step": self._latest,
            "shares": self._shares,
        }

    def _latest_shares(self) -> dict[str, int]:
        """Return the shares at the latest step, with the sum `_WHOLE`."""
        weights = self.weights()
        total = sum(weights.values())
        shares = {name: int(weight / total * _WHOLE) for name, weight in weights.items()}
        shares[max(shares, key=shares.__getitem__)] += _WHOLE - sum(shares.values())
        return shares


class MixedSet[T: Prompted](TrainingSet[T]):
    """Items of several training sets by weight. The position of an item determines its source."""

    def __init__(self, sources: Mapping[str, TrainingSet[T]], weights: Mapping[str, Weight], batch_size: int):
        self._sources, self._weights, self._batch_size = sources, weights, batch_size
        # State of the shares and items drawn of each source, at the start of each step.
        self._starts: list[tuple[dict[str, Any], Counter[str]]] = [({}, Counter())]
        self._latest: tuple[int, list[tuple[str, int]]] = (-1, [])

    def problem(self, position: int) -> T:
        step, place = divmod(position, self._batch_size)
        while len(self._starts) <= step:
            self._draw(len(self._starts) - 1)
        if self._latest[0] != step:
            self._latest = step, self._draw(step)
        name, own = self._latest[1][place]
        return self._sources[name].problem(own)

    def _draw(self, step: int) -> list[tuple[str, int]]:
        """Return the source and the position in it of each item of a step, counted from 0."""
        state, before = self._starts[step]
        shares, counts, drawn = Shares(self._weights, state), before.copy(), list[tuple[str, int]]()
        for _ in range(self._batch_size):
            name = shares.draw(step + 1)
            drawn.append((name, counts[name]))
            counts[name] += 1
        if len(self._starts) == step + 1:
            self._starts.append((shares.state(), counts))
        return drawn

    def finite(self) -> Sequence[T]:
        return [one for source in self._sources.values() for one in source.finite()]

    def only(self, fits: Callable[[T], bool]) -> "MixedSet[T]":
        sources = {name: one.only(fits) for name, one in self._sources.items()}
        return MixedSet(sources, self._weights, self._batch_size)


def items_per_epoch(counts: Mapping[str, int], weights: Mapping[str, Weight]) -> int:
    """Return the items until each finite source is sampled once, with the weights of the first step; 0 if all are
    endless. `counts`: items of a source, 0 for an endless one."""
    first = {name: weight_at(own, 1, 0.0) for name, own in weights.items()}
    total = sum(first.values())
    return max((math.ceil(count * total / first[name]) for name, count in counts.items() if first[name]), default=0)
