"""User code in the episodes of one process: environment, tools or agent, and the endpoint."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import has_endpoint
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.environments.agents import Agents, check_agent
from nemo_rl_lite.environments.registry import check_environment, make_environments, try_environment
from nemo_rl_lite.generation.interface import Generation, Sampling
from nemo_rl_lite.rewards.judge import Judge
from nemo_rl_lite.rollout.collector import ErrorShares
from nemo_rl_lite.rollout.groups import GroupPlayer, LocalPlayers
from nemo_rl_lite.rollout.play import EpisodeRunner, Section, SingleTurn, Turns

ENDPOINT_FILE = "endpoint.json"


class Playing:
    """User code in episodes: an environment, tools or an agent. Its processes start while the run reads its data."""

    def __init__(self, config: Config):
        """Raises ConfigError: the code is invalid."""
        self.tools = check_environment(config.environment)
        """Tools that the environment offers in every episode."""
        check_agent(config.agent)
        self._config = config
        self._environments = make_environments(config.environment)
        # Shared by all attempts of a run, so that session numbers stay unique.
        self._play: EpisodeRunner = (
            SingleTurn() if self._environments is None else Turns(self._environments, config.environment.max_turns)
        )
        self._agents = None if config.agent.name is None else Agents(config.agent, config.generation.serve.host)

    def try_environment(self, problem: Problem) -> None:
        """Take one step in the environment, if there is one. Raises ConfigError: its code is wrong."""
        if self._environments is not None:
            try_environment(self._environments, self._config.environment.name or "", problem)

    @contextmanager
    def players(
        self,
        generation: Generation,
        tokenizer: ChatTokenizer,
        judge: Judge,
        folder: Path,
        say: Callable[[str], None],
        machine: str = "127.0.0.1",
    ) -> Iterator[LocalPlayers]:
        """Yield the players of this process. The endpoint, if the run has one, ends with the block. `machine`: address
        of this machine for clients of the endpoint.

        Raises:
            ConfigError: the endpoint's address cannot be used.
        """
        config, play, longest = self._config, self._play, self._config.policy.max_total_sequence_length
        with ExitStack() as stack:
            if has_endpoint(config):
                # FastAPI takes a second to import.
                from nemo_rl_lite.rollout.agents import AgentPlay
                from nemo_rl_lite.serving.public import ResponderConfig
                from nemo_rl_lite.serving.server import Endpoint, ServedGeneration, bound_socket

                sampling = Sampling.of(config.generation, tokenizer.end_tokens)
                bound, responder = stack.enter_context(bound_socket(config.generation.serve)), None
                endpoint = Endpoint(bound, tokenizer, [config.run_name], longest)
                stack.enter_context(endpoint.running())
                if config.generation.serve.enabled:
                    responder = ResponderConfig(tokenizer, sampling, longest, engine_of(config))
                    url = endpoint.url_at(machine)
                    address = {"base_url": url, "api_key": endpoint.token, "model": endpoint.model}
                    file = folder / ENDPOINT_FILE
                    say(f"serving at {url} during rollouts; the token is in {file}")
                    stack.enter_context(_written(file, address))
                generation = ServedGeneration(generation, endpoint, responder)
                if self._agents is not None:
                    play = AgentPlay(self._agents, endpoint, sampling)
            yield LocalPlayers(generation, GroupPlayer(tokenizer, judge, play, longest))


def section_of(config: Config) -> Section:
    """Return the section of the configuration with the user code of episodes."""
    return "environment" if config.agent.name is None else "agent"


def error_shares(config: Config) -> ErrorShares:
    """Return the maximum shares of failed episodes."""
    taking_part = config.agent if section_of(config) == "agent" else config.environment
    return ErrorShares(config.reward.max_failure_fraction, taking_part.max_failure_fraction)


@contextmanager
def _written(file: Path, content: Mapping[str, str]) -> Iterator[None]:
    """Keep a file, readable by this user only, during the block."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(json.dumps(content, indent=2) + "\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
