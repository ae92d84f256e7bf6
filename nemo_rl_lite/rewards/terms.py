"""The rewards that a configuration adds up, and their calls in one process."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_lite.config.sections.data import RewardConfig
from nemo_rl_lite.config.user_code import own_name
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.host.pool import as_call_error, place_of
from nemo_rl_lite.rewards.registry import find_batch_reward, find_reward
from nemo_rl_lite.rewards.value import RewardError

Parts = dict[str, float] | RewardError
"""Rewards by the label of their term, or the error that prevented one."""


@dataclass(frozen=True)
class Term:
    """One part of a reward; `name` and `kwargs` as `find_reward` has them, `section` the keys that hold them."""

    label: str
    name: str
    kwargs: Mapping[str, Any]
    weight: float
    section: str
    batch_size: int | None = None


def terms_of(config: RewardConfig) -> list[Term]:
    """The configured reward, with weight 1, and then those that are added to it."""
    first = Term(own_name(config.name), config.name, config.kwargs, 1.0, "reward", config.batch_size)
    further = config.terms.items()
    return [
        first,
        *(
            Term(label, one.name, one.kwargs, one.weight, f"reward.terms.{label}", one.batch_size)
            for label, one in further
        ),
    ]


class RewardCalls:
    """Calls the rewards of the terms in this process. An error of a reward becomes a `RewardError`."""

    def __init__(self, terms: Sequence[Term]):
        """Raises ConfigError where there is no such reward."""
        self._terms = {term.label: term for term in terms}
        self._single = {
            term.label: find_reward(term.name, term.kwargs, term.section) for term in terms if term.batch_size is None
        }
        self._batched = {
            term.label: find_batch_reward(term.name, term.kwargs, term.section)
            for term in terms
            if term.batch_size is not None
        }

    async def one(self, response: str, problem: Problem) -> Parts:
        """Judge a response by the terms that take one at a time."""
        parts = dict[str, float]()
        for label, reward in self._single.items():
            part = await self._called(label, reward, response, problem)
            if isinstance(part, RewardError):
                return part
            parts[label] = part
        return parts

    async def batch(
        self, label: str, responses: Sequence[str], problems: Sequence[Problem]
    ) -> Sequence[float | RewardError]:
        """Judge responses by the term `label`, which takes many. An error of the call is the error of each response."""
        found = await self._called(label, self._batched[label], responses, problems)
        return [found] * len(responses) if isinstance(found, RewardError) else found

    async def _called(self, label: str, reward: Callable[..., Any], *arguments: Any) -> Any:
        try:
            value = reward(*arguments)
            return await value if inspect.isawaitable(value) else value
        except RewardError as error:
            failure = error
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raised = as_call_error(error)
            failure = RewardError(f"{raised}{place_of(error)}", raised.details)
        failure.section = self._terms[label].section
        return failure
