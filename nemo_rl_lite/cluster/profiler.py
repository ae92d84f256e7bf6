"""Traces the steps in `profile.steps`, in the launcher and in every worker."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.sections.run import ProfileConfig
from nemo_rl_lite.observability import profiling


class StepProfiler:
    """Writes `profile/step-<step>/<worker>.json.gz`."""

    def __init__(self, config: ProfileConfig, run_folder: Path, groups: Sequence[WorkerGroup]):
        self._config, self._folder, self._groups = config, run_folder / profiling.FOLDER, groups

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Trace the block if `step` is one of them. Nothing is written where the block raises."""
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
            profiling.end(folder / f"{profiling.DRIVER}{profiling.SUFFIX}" if done else None)
            if done:
                wait(*(group.end_profile(folder, profiling.SUFFIX) for group in self._groups))
