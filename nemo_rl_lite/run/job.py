"""What a job is: one run of an algorithm."""

from pathlib import Path
from typing import Protocol

from nemo_rl_lite.checkpoint.resume import Start
from nemo_rl_lite.config.algorithms import algorithm_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.observability.trackers import MetricsLog
from nemo_rl_lite.workers.reserve import StartingWorkers


class Job(Protocol):
    """Reads and checks its data in the constructor, and waits for its workers in `run`."""

    def run(self, metrics: MetricsLog, begun: StartingWorkers, start: Start, setup: Timer) -> dict[str, int]:
        """Train in the processes that have begun, from `start` on; returns each worker's peak memory in bytes. `setup`
        has timed what came before, and `run` times the rest of the start with it."""
        ...


def import_packages(config: Config) -> None:
    """Import what the job of the configured algorithm needs."""
    imported(algorithm_of(config).job)
    from transformers import AutoTokenizer  # noqa: F401


def make_job(config: Config, folder: Path, console: RunConsole, model_path: Path) -> Job:
    """Make the job of the configured algorithm for a run in `folder`. `model_path` is the `starting_model`.

    Raises:
        ConfigError: the model's tokenizer, or a user's code, cannot be used.
        DataError: the data is unusable; the message names file, row and cause.
    """
    return imported(algorithm_of(config).job)(config, folder, console, model_path)
