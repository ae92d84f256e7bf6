"""User code in the episodes of one process: rewards, environments, tools or agents, and the endpoint."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.schema import AgentConfig, Config
from nemo_rl_lite.config.sizes import has_endpoint, saves_unfinished
from nemo_rl_lite.config.sources import naming_source, source_configs
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.environments.agents import Agents, check_agent
from nemo_rl_lite.environments.registry import Environments, check_environment, make_environments, try_environment
from nemo_rl_lite.generation.interface import Generation, Sampling
from nemo_rl_lite.rewards.judge import Judge, make_judge, try_reward
from nemo_rl_lite.rollout.collector import ErrorShares
from nemo_rl_lite.rollout.groups import GroupPlayer, LocalPlayers
from nemo_rl_lite.rollout.play import EpisodeRunner, Section, SingleTurn, Turns

ENDPOINT_FILE = "endpoint.json"


class Playing:
    """User code in episodes, of each source: a reward, and an environment, tools or an agent. Its processes start while
    the run reads its data. Sources with the same section share its processes."""

    def __init__(self, config: Config):
        """Raises ConfigError: the code is invalid."""
        self._config, self._sources = config, source_configs(config)
        self.tools: dict[str, tuple[Tool, ...]] = {}
        """Tools that the environment of a source offers in every episode."""
        judge, environments, agents = _once(make_judge), _once(make_environments), _once(self._make_agents)
        # Shared by all attempts of a run, so that session numbers stay unique.
        saves = saves_unfinished(config)
        turns = _once(lambda own: Turns(made, own.max_turns, saves) if (made := environments(own)) else SingleTurn())
        self._judges, self._environments = dict[str, Judge](), dict[str, Environments | None]()
        self._runners, self._agents = dict[str, EpisodeRunner](), dict[str, Agents | None]()
        for name, one in self._sources.items():
            with naming_source(name):
                self.tools[name] = check_environment(one.environment)
                check_agent(one.agent)
                self._judges[name], self._environments[name] = judge(one.reward), environments(one.environment)
                self._runners[name], self._agents[name] = turns(one.environment), agents(one.agent)

    def _make_agents(self, config: AgentConfig) -> Agents | None:
        return None if config.name is None else Agents(config, self._config.generation.serve.host)

    def try_reward(self, problem: Problem) -> None:
        """Score the problem's own answer; see `judge.try_reward`."""
        with naming_source(problem.source):
            try_reward(self._judges[problem.source], problem)

    def try_environment(self, problem: Problem) -> None:
        """Take one step in the environment, if there is one. Raises ConfigError: its code is wrong."""
        if (environments := self._environments[problem.source]) is not None:
            name = self._sources[problem.source].environment.name or ""
            with naming_source(problem.source):
                try_environment(environments, name, problem)

    @contextmanager
    def players(
        self,
        generation: Generation,
        tokenizer: ChatTokenizer,
        folder: Path,
        say: Callable[[str], None],
        machine: str = "127.0.0.1",
    ) -> Iterator[LocalPlayers]:
        """Yield the players of this process. The endpoint, if the run has one, ends with the block. `machine`: address
        of this machine for clients of the endpoint.

        Raises:
            ConfigError: the endpoint's address cannot be used.
        """
        config, runners, longest = self._config, dict(self._runners), self._config.policy.max_total_sequence_length
        with ExitStack() as stack:
            if has_endpoint(config):
                # FastAPI takes a second to import.
                from nemo_rl_lite.rollout.agents import AgentPlay
                from nemo_rl_lite.serving.public import ResponderConfig
                from nemo_rl_lite.serving.server import Endpoint, ServedGeneration, bound_socket

                bound, responder = stack.enter_context(bound_socket(config.generation.serve)), None
                endpoint = Endpoint(bound, tokenizer, [config.run_name], longest)
                stack.enter_context(endpoint.running())
                if config.generation.serve.enabled:
                    sampling = Sampling.of(config.generation, tokenizer.end_tokens)
                    responder = ResponderConfig(tokenizer, sampling, longest, engine_of(config))
                    url = endpoint.url_at(machine)
                    address = {"base_url": url, "api_key": endpoint.token, "model": endpoint.model}
                    file = folder / ENDPOINT_FILE
                    say(f"serving at {url} during rollouts; the token is in {file}")
                    stack.enter_context(_written(file, address))
                generation = ServedGeneration(generation, endpoint, responder)
                for name, agents in self._agents.items():
                    if agents is not None:
                        own = Sampling.of(self._sources[name].generation, tokenizer.end_tokens)
                        runners[name] = AgentPlay(agents, endpoint, own)
            continues = config.generation.continue_responses
            players = {
                name: GroupPlayer(tokenizer, self._judges[name], runner, longest, continues)
                for name, runner in runners.items()
            }
            yield LocalPlayers(generation, players)


def _once[Section, Made](make: Callable[[Section], Made]) -> Callable[[Section], Made]:
    """Return a function that calls `make` once for equal sections of the configuration."""
    made = list[tuple[Section, Made]]()

    def find(section: Section) -> Made:
        found = next((own for other, own in made if other == section), None)
        if found is None:
            found = make(section)
            made.append((section, found))
        return found

    return find


def error_shares(config: Config) -> dict[str, ErrorShares]:
    """Return the maximum shares of failed episodes of each source."""
    return {name: _error_shares(one) for name, one in source_configs(config).items()}


def _error_shares(config: Config) -> ErrorShares:
    section: Section = "environment" if config.agent.name is None else "agent"
    limit = getattr(config, section).max_failure_fraction
    return ErrorShares(config.reward.max_failure_fraction, limit, section)


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
