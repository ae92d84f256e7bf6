"""One run, from its folder to its summary, with restarts after lost workers; and the dry run."""

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
from rich.markup import escape

from nemo_rl_lite.checkpoint.resume import Start, changed, checkpoint_store, find_start
from nemo_rl_lite.cluster.calls import START
from nemo_rl_lite.cluster.heartbeat import nodes_of
from nemo_rl_lite.cluster.runtime import ray_runtime
from nemo_rl_lite.compat.imports import quick_imports
from nemo_rl_lite.compat.ray import lost_process
from nemo_rl_lite.config.algorithms import algorithm_of, replayed_run
from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.errors import ConfigError, LauncherError, Violation, WorkerError
from nemo_rl_lite.generation.mismatch import PLAIN_ENGINES, within_budget
from nemo_rl_lite.models.folder import exported
from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.observability.callbacks import Callbacks
from nemo_rl_lite.observability.console import RunConsole, report_start
from nemo_rl_lite.observability.environment import described
from nemo_rl_lite.observability.live import shown_to_others
from nemo_rl_lite.observability.liveness import latest_progress, limited, watched
from nemo_rl_lite.observability.runs import LOCK_FILE
from nemo_rl_lite.observability.signal import WeakSignals
from nemo_rl_lite.observability.summary import Summary, charts, show_summary, summarize, tracked, view_of
from nemo_rl_lite.observability.timer import Timer, seconds_since_start
from nemo_rl_lite.observability.trackers import MetricsLog
from nemo_rl_lite.planning.budget import size, size_of
from nemo_rl_lite.planning.page import make_plan, show_plan
from nemo_rl_lite.run.folder import (
    check_folder,
    kept_unless_begun,
    locked,
    status_kept,
    write_ending,
    write_error,
    write_start,
)
from nemo_rl_lite.run.model import settled, show_memory_plan, starting_model, with_chosen_template, with_teacher
from nemo_rl_lite.system.stopping import was_asked_to_end
from nemo_rl_lite.validation.compose import default_values
from nemo_rl_lite.validation.rewards import held_out_label
from nemo_rl_lite.workers.budget import RestartBudget
from nemo_rl_lite.workers.reserve import StartingWorkers, begin, begin_again, reserve

log = logging.getLogger(__name__)
# The job of a run that trains on the rollouts of another.
_REPLAY = "nemo_rl_lite.run.replay.ReplayJob"


class Job(Protocol):
    """One algorithm's part of a run. The constructor reads and checks the data."""

    def resume_lines(self, start: Start) -> Iterator[str]:
        """Yield lines for the terminal about data that has changed since the checkpoint.

        Raises:
            ConfigError: the command asks for more steps, but none is left.
        """
        ...

    def launch(self, begun: StartingWorkers, start: Start, setup: Timer, budget: RestartBudget) -> "Training":
        """Wait for the starting processes, which load `start`; return the function that trains. `setup` times the
        start-up, and `budget` counts restarts during training. The run's folder does not change."""
        ...


Training = Callable[[MetricsLog, Callbacks], dict[str, int]]
"""Trains, and returns each worker's peak memory in bytes."""


def make_job(config: Config, folder: Path, console: RunConsole, model_path: Path) -> Job:
    """Create the configured algorithm's job for a run in `folder`. `model_path`: see `starting_model`.

    Raises:
        ConfigError: the tokenizer or user code is invalid.
        DataError: the data is invalid; the message names file, row and cause.
    """
    job = algorithm_of(config).job if replayed_run(config) is None else _REPLAY
    return imported(job)(config, folder, console, model_path)


def run(config: Config, folder: Path, command: str, callbacks: Callbacks) -> Summary:
    """Train in `folder`, from the starting weights or the folder's newest checkpoint. When a worker's process dies
    or hangs, restart from the newest checkpoint, at most `cluster.max_restarts` times without a new step.

    Raises:
        ConfigError: the folder holds another run or a finished one, or another process runs there.
        RunStopped: the run was asked to stop, and is saved.
        LauncherError: any other error that a user can act on.
    """
    whole_config, console = described(config), RunConsole()
    # Lock first: an unfinished checkpoint in the folder may belong to another process.
    with locked(folder):
        check_folder(folder, whole_config)
        start = _find_start(config, whole_config, folder, console)
        attempts = _Attempts(config, folder, whole_config, console, callbacks)
        with kept_unless_begun(folder, lambda: attempts.has_begun):
            write_start(folder, whole_config, command)
            with status_kept(folder, saves=config.checkpoint.save_period > 0), shown_to_others(folder):
                summary = attempts.until_done(start)
        if config.checkpoint.exports:
            _publish(config, folder, console)
        if config.logger.plots:
            write_last_report(folder, console)
        return summary


def _publish(config: Config, folder: Path, console: RunConsole) -> None:
    """Write the exported model's cards, and push it if configured. Errors are only reported, as the run is done."""
    from nemo_rl_lite.run.publish import push, write_cards

    model, options = folder / "hf", config.checkpoint
    try:
        write_cards(model, config, folder)
    except Exception as error:  # a base model's card may be malformed in any way
        log.debug("the card's traceback", exc_info=True)
        console.say(f"no model card was written ({type(error).__name__}: {error})")
    if options.push_to_hub is not None:
        try:
            with console.busy(f"pushing {model} to {options.push_to_hub}"):
                address = push(exported(config, model), options.push_to_hub, options.hub_private_repo)
            console.say(f"hub      {address}")
        except LauncherError as error:
            console.say(str(error))


def write_last_report(folder: Path, console: RunConsole) -> None:
    """Write the report of a finished run. Errors are only reported, as the run is done."""
    from nemo_rl_lite.report.page import write_report

    try:
        console.say(f"report   {write_report([folder])}")
    except Exception as error:  # a file of the run may be damaged in any way
        log.debug("the report's traceback", exc_info=True)
        console.say(f"no report was written ({error}); to try again: nrl-lite report {folder}")


def _find_start(config: Config, whole_config: Mapping[str, Any], folder: Path, console: RunConsole) -> Start:
    checkpoint_store(config, folder).tidy()
    return find_start(config, whole_config, folder, console.busy)


class _Attempts:
    """Attempts of a run. Data is read and checked once. Ray and the engines stay from one attempt to the next if the
    engines are intact."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        whole_config: Mapping[str, Any],
        console: RunConsole,
        callbacks: Callbacks,
    ):
        self._config, self._folder, self._whole_config, self._console = config, folder, whole_config, console
        self._callbacks = callbacks
        self._budget = RestartBudget(config.cluster.max_restarts, lambda: latest_progress().get("step", 0))
        self.has_begun = False
        """True once the run has changed its folder."""
        self._job: Job | None = None
        self._model: Path | None = None
        self._runtime = ExitStack()
        self._begun: StartingWorkers | None = None
        """Workers of the running Ray, if an attempt can use them."""
        self._avoided = list[str]()
        """Nodes whose workers failed, the newest last."""

    def until_done(self, start: Start) -> Summary:
        """Run from `start`, and again from the newest checkpoint when a worker is lost or hangs."""
        with self._runtime:
            while True:
                try:
                    return self._run(start)
                except WorkerError as error:
                    if lost_process():
                        # Ray's client soon ends a process whose Ray is broken.
                        self._end_workers()
                    if was_asked_to_end():
                        # The same request may have ended the worker.
                        raise KeyboardInterrupt from error
                    restart_fails = self._budget.taken > 0 and error.phase == START
                    if not (error.lost or error.is_transient or restart_fails):
                        raise
                    count = self._budget.take(error)
                    self._console.say(f"{error}; restarting from the last checkpoint ({count})")
                    self._note_nodes(error)
                start = _find_start(self._config, self._whole_config, self._folder, self._console)
                self._begun = self._kept_engines(start)

    def _note_nodes(self, error: WorkerError) -> None:
        """Avoid the nodes of the failed workers at the next placement."""
        if self._begun is not None:
            nodes = nodes_of(error.worker.split(", "))
            self._avoided = [*(one for one in self._avoided if one not in nodes), *nodes]

    def _kept_engines(self, start: Start) -> StartingWorkers | None:
        """Restart all workers except the engines, in the same places. Return None if that is impossible, or if the
        previous restart brought no new step. Engines above the mismatch budget cannot stay either."""
        if self._begun is None or self._begun.generation is None or self._budget.taken > 1:
            return None
        given = self._begun.config.generation
        if within_budget(given, self._folder) is not given:
            return None
        try:
            begun = begin_again(self._begun, start.policy is not None)
        except WorkerError as error:
            self._console.say(f"the engines restart too: {error}")
            return None
        self._console.say("the engines keep running; policy, teacher and rollout workers restart")
        return begun

    def _start_workers(self, setup: Timer, start: Start) -> StartingWorkers:
        """Start Ray and all workers."""
        config, folder, console = self._config, self._folder, self._console
        self._end_workers()
        with setup("ray"):
            self._runtime.enter_context(ray_runtime())
        with setup("processes"):
            reserved = reserve(config, folder, self._avoided)
        # Workers import and build while this process imports and reads the data.
        with setup("packages"), quick_imports():
            imported(algorithm_of(config).job)
            from transformers import AutoTokenizer  # noqa: F401
        with setup("model"):
            if self._model is None:
                self._model = with_chosen_template(config, starting_model(config, console), folder, console.say)
            generation = within_budget(config.generation, folder)
            if generation is not config.generation:
                console.say(
                    f"engines  with plain settings, since others were above the budget ({folder / PLAIN_ENGINES})"
                )
            config = replace(config, generation=generation)
            config = settled(with_teacher(config, console), self._model, console)
            return begin(replace(reserved, config=config), self._model, folder, start.policy is not None)

    def _end_workers(self) -> None:
        self._begun = None
        self._runtime.close()

    def _run(self, start: Start) -> Summary:
        folder, console, setup = self._folder, self._console, Timer()
        for line in start.lines():
            console.say(line)
        if self._job is None:
            setup.add("command", seconds_since_start())
        begun = self._begun = self._begun or self._start_workers(setup, start)
        with ExitStack() as stack:
            with setup("data"):
                self._job = self._job or make_job(begun.config, folder, console, begun.model_path)
            for line in self._job.resume_lines(start):
                console.say(line)
            with (
                watched(self._last_words, lost_process),
                limited("the launcher's own work", begun.config.cluster.phase_timeout_s),
            ):
                with setup("memory_plan"):
                    predicted = show_memory_plan(begun.config, begun.model_path, console)
                train = self._job.launch(begun, start, setup, self._budget)
                self.has_begun = True
                with setup("loggers"):
                    opened = MetricsLog.open(begun.config.logger, folder, self._whole_config, start.steps)
                metrics = stack.enter_context(closing(opened))
                report_start(setup, start.steps, metrics, console, predicted)
                peak_memory = train(metrics, self._callbacks)
            self._runtime.close()
            values = dict(flatten(self._whole_config))
            view = view_of(begun.config.algorithm.name, held_out_label(values))
            summary = summarize(metrics, folder, peak_memory, view, WeakSignals(values).at_end(metrics.history))
            metrics.log_summary(tracked(summary), charts(summary, metrics))
            show_summary(summary, metrics, console, begun.config.run_name, view)
        return summary

    def _last_words(self, error: WorkerError) -> None:
        """Report an error on the terminal and in the folder if the main thread hangs."""
        write_error(self._folder, error)
        write_ending(self._folder, "failed", error.exit_status, str(error))
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()


def dry_run(config: Config, overrides: Sequence[str], run_folder: Path | None) -> None:
    """Print the differences from the defaults, check the data and print the plan. It starts no worker, and writes only
    to the caches of models and data. `run_folder`: the folder that the command names, if any.

    Raises:
        LauncherError: an error that would end the run before its first process.
    """
    console = RunConsole()
    changes = changed(default_values(config.algorithm.name), asdict(config), ignored=())
    # Values such as [aeiou] look like markup.
    rows = [[escape(cell) for cell in (key, repr(before), repr(now))] for key, (before, now) in changes.items()]
    console.table("differences from the defaults", ["", "default", "here"], rows)
    whole_config = described(config)
    with tempfile.TemporaryDirectory() as empty:
        folder = run_folder or Path(empty)
        check_folder(folder, whole_config)
        if (folder / LOCK_FILE).exists():
            with locked(folder):
                pass
        start = find_start(config, whole_config, folder, console.busy)
        for line in start.lines():
            console.say(line)
        model = starting_model(config, console, untrained=Path(empty))
        model = with_chosen_template(config, model, Path(empty), console.say)
        job = make_job(with_teacher(config, console, untrained=Path(empty)), Path(empty), console, model)
        for line in job.resume_lines(start):
            console.say(line)
    runs_here = not on_gpus(config) and config.cluster.num_nodes == 1
    there = psutil.virtual_memory().total if runs_here else None
    plan = make_plan(config, overrides, find_shape(config.policy.model_name), size_of(None), there)
    show_plan(plan, console)
    if there is not None and not plan.fits:
        rule = f"the run needs {size(plan.budget.host)} of memory, and this machine has {size(there)}"
        batch = plan.micro_batch
        shorter = f"policy.max_total_sequence_length (now {config.policy.max_total_sequence_length})"
        fix = f"a smaller {batch.key} (now {batch.now}) or {shorter}, fewer ranks or engines, or a smaller model"
        raise ConfigError([Violation("policy", None, rule, fix)])
    console.say("dry run: nothing was started")
