"""Runs one command, from its folder to its summary, and restarts it where workers are lost."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_rl_lite.checkpoint.resume import Start, checkpoint_store, find_start
from nemo_rl_lite.cluster.runtime import ray_runtime
from nemo_rl_lite.compat.ray import lost_process
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.environment import described
from nemo_rl_lite.observability.liveness import limited, watched
from nemo_rl_lite.observability.summary import Summary, charts, show_summary, summarize, tracked
from nemo_rl_lite.observability.timer import Timer, seconds_since_start
from nemo_rl_lite.observability.trackers import MetricsLog
from nemo_rl_lite.observability.views import view_of
from nemo_rl_lite.run.folder import check_folder, locked, status_kept, write_ending, write_error, write_start
from nemo_rl_lite.run.job import Job, import_packages, make_job
from nemo_rl_lite.run.model import settled, starting_model, with_chosen_template, with_teacher
from nemo_rl_lite.system.stopping import was_asked_to_end
from nemo_rl_lite.workers.reserve import begin, reserve


def run(config: Config, folder: Path, command: str) -> Summary:
    """Train in `folder`, from the starting weights or the folder's newest checkpoint. Where a worker's process dies,
    restart from the newest checkpoint, at most `cluster.max_restarts` times.

    Raises:
        ConfigError: the folder holds another run, or one that is done, or another process is running there.
        RunStopped: the run was asked to end, and is saved.
        LauncherError: any other error that a user can act on.
    """
    whole_config, console = described(config), RunConsole()
    # Lock before changing the folder: an unfinished checkpoint there may belong to another process.
    with locked(folder):
        check_folder(folder, whole_config)
        start = _find_start(config, whole_config, folder, console)
        write_start(folder, whole_config, command)
        with status_kept(folder, saves=config.checkpoint.save_period > 0):
            summary = _with_restarts(config, folder, whole_config, start, console)
        if config.logger.plots:
            from nemo_rl_lite.report.page import write_report

            console.say(f"report   {write_report([folder])}")
        return summary


def _with_restarts(
    config: Config, folder: Path, whole_config: Mapping[str, Any], start: Start, console: RunConsole
) -> Summary:
    attempts, restarts = _Attempts(config, folder, whole_config, console), 0
    while True:
        try:
            return attempts.run(start)
        except WorkerError as error:
            if was_asked_to_end():
                # What asked this process to end may have ended the worker.
                raise KeyboardInterrupt from error
            if not error.lost or restarts == config.cluster.max_restarts:
                raise
            restarts += 1
            limit = f"restart {restarts} of at most {config.cluster.max_restarts}, cluster.max_restarts"
            console.say(f"{error}; starting again from the last checkpoint ({limit})")
        start = _find_start(config, whole_config, folder, console)


def _find_start(config: Config, whole_config: Mapping[str, Any], folder: Path, console: RunConsole) -> Start:
    checkpoint_store(config, folder).tidy()
    return find_start(config, whole_config, folder, console.busy)


class _Attempts:
    """Runs attempts, each with its own Ray and workers; reads and checks the data once."""

    def __init__(self, config: Config, folder: Path, whole_config: Mapping[str, Any], console: RunConsole):
        self._config, self._folder, self._whole_config, self._console = config, folder, whole_config, console
        self._job: Job | None = None
        self._model: Path | None = None

    def run(self, start: Start) -> Summary:
        config, folder, console, setup = self._config, self._folder, self._console, Timer()
        for line in start.lines():
            console.say(line)
        if self._job is None:
            setup.add("command", seconds_since_start())
        with ExitStack() as stack:
            with ExitStack() as runtime:
                with setup("ray"):
                    runtime.enter_context(ray_runtime())
                with setup("processes"):
                    reserved = reserve(config, folder)
                # The workers import their packages and build while this process imports its own and reads the data.
                with setup("packages"):
                    import_packages(config)
                with setup("model"):
                    if self._model is None:
                        self._model = with_chosen_template(config, starting_model(config, console), folder, console.say)
                    model_path = self._model
                    config = with_teacher(config, console)
                    config = settled(config, model_path, console)
                    begun = begin(replace(reserved, config=config), model_path)
                with setup("data"):
                    self._job = self._job or make_job(config, folder, console, begun.model_path)
                with setup("loggers"):
                    log = MetricsLog.open(config.logger, folder, self._whole_config, start.steps)
                metrics = stack.enter_context(closing(log))
                with (
                    watched(self._last_words, lost_process),
                    limited("the launcher's own work", config.cluster.phase_timeout_s),
                ):
                    peak_memory = self._job.run(metrics, begun, start, setup)
            summary = summarize(metrics, folder, peak_memory)
            metrics.log_summary(tracked(summary), charts(summary, metrics))
            view = view_of(config.algorithm.name)
            show_summary(summary, metrics, console, config.run_name, view)
        return summary

    def _last_words(self, error: WorkerError) -> None:
        """What a launcher that does not react any more leaves: the error on the terminal and in its folder."""
        write_error(self._folder, error)
        write_ending(self._folder, "failed", error.exit_status, str(error))
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
