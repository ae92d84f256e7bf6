"""Mixture of sources: which source each prompt of a step comes from, and metrics by source."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nemo_rl_lite.config.sources import ONLY, Weight
from nemo_rl_lite.data.mixture import Shares
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.rollout.episode import Sampled
from nemo_rl_lite.rollout.rollout import Rollout, passes

Place = Any
"""Place of a prompt in its data: a position, or a pair of source and position. JSON keeps it."""


class Order(Protocol):
    """Order in which prompts are sampled."""

    def draw(self, step: int) -> list[Place]:
        """Return the skipped places, and then the next one that is sampled for a step."""
        ...

    def problem(self, place: Place, /) -> Problem: ...

    def note(self, place: Place, /, taught: bool) -> None:
        """Note that training uses the prompt at this place; `taught`: whether its rewards differed."""
        ...

    def give_back(self, draws: Iterable[Sequence[Place]]) -> None:
        """Take back draws that are not used."""
        ...

    def observe(self, sampled: Sequence[Sampled]) -> None:
        """Note the episodes of a rollout."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the progress of each source of a mixture."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        ...


class SourceOrder(Order, Protocol):
    """Order of one source, which counts its epochs."""

    @property
    def epochs(self) -> float | None:
        """Number of passes over the data; None if it is endless."""
        ...


class MixedOrder:
    """`Order` of a mixture. A place is a pair of source and position."""

    def __init__(self, orders: Mapping[str, SourceOrder], shares: Shares):
        self._orders, self._shares = orders, shares

    def draw(self, step: int) -> list[Place]:
        source = self._shares.draw(step)
        return [(source, position) for position in self._orders[source].draw(step)]

    def problem(self, place: Place) -> Problem:
        source, position = place
        return self._orders[source].problem(position)

    def note(self, place: Place, taught: bool) -> None:
        source, position = place
        self._orders[source].note(position, taught)

    def give_back(self, draws: Iterable[Sequence[Place]]) -> None:
        for draw in draws:
            source = draw[-1][0]
            # A resumed run may not have the source.
            if source in self._orders:
                self._shares.give_back(source)
                self._orders[source].give_back([[position for _, position in draw]])

    def observe(self, sampled: Sequence[Sampled]) -> None:
        self._shares.observe(solve_rates(sampled))

    def metrics(self) -> dict[str, float]:
        epochs = {f"source/{name}/epochs": order.epochs for name, order in self._orders.items()}
        weights = {f"source/{name}/weight": weight for name, weight in self._shares.weights().items()}
        return weights | {name: count for name, count in epochs.items() if count is not None}

    def state(self) -> dict[str, Any]:
        return {"sources": {name: order.state() for name, order in self._orders.items()}, **self._shares.state()}


def mixed_order(
    weights: Mapping[str, Weight], order: Callable[[str, Mapping[str, Any]], SourceOrder], state: Mapping[str, Any]
) -> MixedOrder:
    """Return the order of a mixture. `order` returns that of a source in its state. `state`: of an earlier run, or
    empty."""
    saved = state.get("sources", {})
    orders = {name: order(name, saved.get(name, {"position": 0})) for name in weights}
    return MixedOrder(orders, Shares(weights, state))


def solve_rates(sampled: Sequence[Sampled]) -> dict[str, float]:
    """Return the share of the samples with a reward of at least 1, by source."""
    return {name: float(passes(np.array(rewards)).mean()) for name, rewards in _rewards(sampled).items()}


def metrics_by_source(rollout: Rollout) -> dict[str, float]:
    """Return metrics of each source: `reward` and `solve_rate` of all sampled prompts, the progress, and all else of
    kept episodes. Without sources there are none."""
    rewards, rates, found = _rewards(rollout.sampled), solve_rates(rollout.sampled), dict(rollout.progress)
    for name, own in _by_source(rollout.episodes).items():
        values = {
            "prompt_share": len(own) / len(rollout.episodes),
            "mean_gen_tokens_per_sample": sum(one.generated for one in own) / len(own),
            "truncation_rate": sum(one.ending == "length" for one in own) / len(own),
        }
        if judged := rewards.get(name):
            values |= {"reward": sum(judged) / len(judged), "solve_rate": rates[name]}
        found |= {f"source/{name}/{metric}": value for metric, value in values.items()}
    return found


def _rewards(episodes: Sequence[Sampled]) -> dict[str, list[float]]:
    """Return the rewards that have not failed, by source."""
    found: dict[str, list[float]] = {}
    for one in episodes:
        if one.reward is not None:
            found.setdefault(one.source, []).append(one.reward)
    return found


def _by_source(episodes: Sequence[Sampled]) -> dict[str, list[Sampled]]:
    """Return the episodes of each named source, by name."""
    names = sorted({one.source for one in episodes} - {ONLY})
    return {name: [one for one in episodes if one.source == name] for name in names}


def validation_by_source(rollout: Rollout) -> dict[str, float]:
    """Return mean reward and length of a validation, by source. Without sources there are none."""
    own = _by_source(rollout.episodes)
    rewards = {name: judged for name, judged in _rewards(rollout.episodes).items() if name}
    lengths = {name: sum(one.generated for one in episodes) / len(episodes) for name, episodes in own.items()}
    return {
        **{f"source/{name}/accuracy": sum(judged) / len(judged) for name, judged in rewards.items()},
        **{f"source/{name}/avg_length": length for name, length in lengths.items()},
    }
