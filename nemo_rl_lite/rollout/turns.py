"""How an environment continues an episode between two turns of the assistant."""

import logging
from dataclasses import dataclass

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.environments.interface import Environment, Observation
from nemo_rl_lite.errors import DataError, WorkerError
from nemo_rl_lite.observability.limits import limited
from nemo_rl_lite.rewards.registry import checked_reward
from nemo_rl_lite.rollout.episode import Episode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turns:
    """An environment, the largest number of turns in an episode, and the seconds that an answer may take."""

    environment: Environment
    max_turns: int
    timeout_s: float | None

    def continues(self, episode: Episode, tokenizer: ChatTokenizer, room: int) -> bool:
        """Let the environment answer the last turn. Returns whether another turn follows, for which the episode is then
        ready; that turn has to begin within `room` tokens.

        Raises:
            DataError: the environment raises, or answers with something unusable.
        """
        observation = self._observe(episode)
        if observation.reward is not None:
            episode.reward = (episode.reward or 0.0) + observation.reward
        if observation.done or episode.ending == "length":
            return False
        if len(episode.turns) == self.max_turns:
            episode.ending = "turns"
            return False
        tokens = tokenizer.between_turns(observation.messages, episode.tokens[-1])
        if len(episode.tokens) + len(tokens) > room:
            episode.ending = "length"
            return False
        episode.add_messages(tokens, observation.messages)
        return True

    def _observe(self, episode: Episode) -> Observation:
        kind = type(self.environment)
        name = f"{kind.__module__}.{kind.__qualname__}"
        try:
            with limited(f"step() of the environment {name}", self.timeout_s):
                observation = self.environment.step(episode.problem, [*episode.problem.messages, *episode.said])
            _check(observation)
        except WorkerError:
            raise
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            log.info("the environment's traceback", exc_info=True)
            raise DataError(
                f"the environment {name} failed after turn {len(episode.turns)} of "
                f"{_start(episode.problem)!r}: {type(error).__name__}: {error}"
            ) from error
        return observation


def _check(observation: Observation) -> None:
    if not isinstance(observation, Observation):
        raise TypeError(f"step() returned {type(observation).__name__}, not an Observation")
    if not observation.done and not observation.messages:
        raise ValueError("step() returned no message, although the episode is not done")
    if observation.reward is not None:
        checked_reward("step()", observation.reward)


def _start(problem: Problem) -> str:
    return problem.messages[-1]["content"][:60]
