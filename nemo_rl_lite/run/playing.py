"""How a run's episodes are played: with an environment, by an agent, or in one turn; the endpoint of the engines."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from nemo_rl_lite.agents.calls import Agents, check_agent
from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import has_endpoint
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.environments.registry import check_environment, make_environments
from nemo_rl_lite.generation.interface import Generation, Sampling
from nemo_rl_lite.rollout.play import EpisodeRunner, SingleTurn, Turns

ENDPOINT_FILE = "endpoint.json"


class Playing:
    """The user's code that takes part in episodes. Its processes start at once, while the run still reads its data."""

    def __init__(self, config: Config):
        """Raises ConfigError where that code cannot be used."""
        self.tools = check_environment(config.environment)
        """The tools that the environment offers in every episode."""
        check_agent(config.agent)
        self._config = config
        environments = make_environments(config.environment)
        # One for all attempts of a run, so that no session of an earlier attempt has the same number.
        self._play: EpisodeRunner = (
            SingleTurn() if environments is None else Turns(environments, config.environment.max_turns)
        )
        self._agents = None if config.agent.name is None else Agents(config.agent, config.generation.serve.host)

    @contextmanager
    def through(
        self, generation: Generation, tokenizer: ChatTokenizer, folder: Path, say: Callable[[str], None]
    ) -> Iterator[tuple[Generation, EpisodeRunner]]:
        """Yield what rollouts need: the engines, with their endpoint where the run has one, and how an episode is
        played. The endpoint ends with the block.

        Raises:
            ConfigError: the endpoint's address cannot be used.
        """
        if has_endpoint(self._config):
            with self._through_endpoint(generation, tokenizer, folder, say) as both:
                yield both
        else:
            yield generation, self._play

    @contextmanager
    def _through_endpoint(
        self, generation: Generation, tokenizer: ChatTokenizer, folder: Path, say: Callable[[str], None]
    ) -> Iterator[tuple[Generation, EpisodeRunner]]:
        # FastAPI takes a second to import, and few runs need it.
        from nemo_rl_lite.endpoint.anybody import Speaker
        from nemo_rl_lite.endpoint.server import Endpoint, ServedGeneration
        from nemo_rl_lite.rollout.agents import AgentPlay

        config, longest = self._config, self._config.policy.max_total_sequence_length
        sampling = Sampling.of(config.generation, tokenizer.end_tokens)
        endpoint, speaker = Endpoint(config.generation.serve, tokenizer, config.run_name, longest), None
        with endpoint.running():
            told = nullcontext()
            if config.generation.serve.enabled:
                speaker = Speaker(tokenizer, sampling, longest, engine_of(config).temperatures)
                address = {"base_url": endpoint.url, "api_key": endpoint.token, "model": endpoint.model}
                told = _written(folder / ENDPOINT_FILE, address)
                say(f"the engines answer at {endpoint.url} during rollouts; the token is in {folder / ENDPOINT_FILE}")
            play = self._play if self._agents is None else AgentPlay(self._agents, endpoint, sampling)
            with told:
                yield ServedGeneration(generation, endpoint, speaker), play


@contextmanager
def _written(file: Path, content: Mapping[str, str]) -> Iterator[None]:
    """Write a file that only this user may read, for the time of the block."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(json.dumps(content, indent=2) + "\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
