"""Traces of the steps that `profile.steps` names, of the launcher and of every worker."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_lite.cluster.workers import WorkerGroup, wait
from nemo_rl_lite.config.schema import ProfileConfig
from nemo_rl_lite.observability import profiling

FOLDER, SUFFIX = "profile", ".json.gz"


class StepProfiler:
    """Writes `profile/step-<step>/<worker>.json.gz`."""

    def __init__(self, config: ProfileConfig, run_folder: Path, groups: Sequence[WorkerGroup]):
        self._config, self._folder, self._groups = config, run_folder / FOLDER, groups

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Records the block, if it is a step to look into. Where it fails, nothing is written."""
        if step not in self._config.steps:
            yield
            return
        folder, done = self._folder / f"step-{step:08d}", False
        wait(*(group.begin_profile(self._config.tool) for group in self._groups))
        profiling.begin(self._config.tool, on_device=False)
        try:
            yield
            done = True
        finally:
            profiling.end(folder / f"driver{SUFFIX}" if done else None)
            if done:
                wait(*(group.end_profile(folder, SUFFIX) for group in self._groups))
