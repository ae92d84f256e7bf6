"""Replay: steps of a run again, from its saved rollouts and a checkpoint, with other settings and without engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_lite.checkpoint.resume import CHECKPOINTS, Start, locate
from nemo_rl_lite.checkpoint.store import CheckpointStore
from nemo_rl_lite.config.algorithms import ALGORITHMS, replayed_run
from nemo_rl_lite.config.experiments import as_override, as_words, expanded
from nemo_rl_lite.config.keys import RUN_FOLDER, SWEEP_FOLDER
from nemo_rl_lite.config.overrides import given_keys
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.config.sizes import policy_ranks
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.observability.callbacks import Callbacks
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.environment import CONFIG_FILE
from nemo_rl_lite.observability.runs import read_json
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.observability.trackers import MetricsLog
from nemo_rl_lite.report.record import metrics_by_step
from nemo_rl_lite.rollout.replayed import SavedRollouts
from nemo_rl_lite.rollout.store import rollout_files, step_of
from nemo_rl_lite.run.command import jobs, launch, values_of
from nemo_rl_lite.run.jobs import GRPOJob
from nemo_rl_lite.validation.compose import compose_config, is_of
from nemo_rl_lite.workers.budget import RestartBudget
from nemo_rl_lite.workers.launch import launch_policy
from nemo_rl_lite.workers.policy import RemotePolicy, RemoteTeacher
from nemo_rl_lite.workers.reserve import StartingWorkers

# Keys and sections that determine what the saved rollouts contain, and those that the command sets.
_FIXED = (
    *("data", "reward", "environment", "agent", "generation", "policy.model_name", "policy.tokenizer"),
    *(f"algorithm.{name}" for name in ("seed", "num_prompts_per_step", "num_generations_per_prompt", "credit")),
    *(f"algorithm.{name}" for name in ("use_dynamic_sampling", "oversample", "dynamic_sampling_max_gen_batches")),
    *(f"algorithm.{name}" for name in ("solved_cooldown_epochs", "rollouts", "max_num_steps", "max_num_epochs")),
    *(f"algorithm.{name}" for name in ("val_period", "val_at_start", "val_at_end", "max_val_samples")),
    *("policy.max_total_sequence_length", "checkpoint.resume_from"),
)
# Sections that do not change results: the unchanged steps before the replayed ones use them, too.
_FREE = ("cluster", "logger")
_BEFORE = "before"
# Metrics of the table, if both runs have them.
_COMPARED = (
    *("loss", "grad_norm", "kl_penalty", "entropy", "probs_ratio_max", "clip_ratio/low", "clip_ratio/high"),
    *("correction/weight", "correction/truncated", "correction/masked", "correction/rejected", "lr"),
)


class ReplayJob(GRPOJob):
    """The `Job` of a replay: the loop of GRPO and distillation with `SavedRollouts`. It reads no data, and neither
    plays nor scores an episode."""

    def __init__(self, config: Config, folder: Path, console: RunConsole, model_path: Path):
        # Skip the constructor of `GRPOJob`, which reads the data.
        super(GRPOJob, self).__init__(config, folder, console, model_path)
        self._validation, self._data = [], {}
        self._limit_steps(None)

    def resume_lines(self, start: Start) -> Iterator[str]:
        """See `Job.resume_lines`."""
        return iter(())

    def launch(
        self, begun: StartingWorkers, start: Start, setup: Timer, budget: RestartBudget
    ) -> Callable[..., dict[str, int]]:
        """See `Job.launch`."""
        config, console = self._config, self._console
        with console.busy(f"starting {policy_ranks(config)} policy rank(s)"):
            policy = launch_policy(begun, start.policy, setup)
            teacher = None if begun.teacher_group is None else RemoteTeacher.of(config, begun.teacher_group)
        return partial(self._replay, policy, teacher, start)

    def _replay(
        self,
        policy: RemotePolicy,
        teacher: RemoteTeacher | None,
        start: Start,
        metrics: MetricsLog,
        callbacks: Callbacks,
    ) -> dict[str, int]:
        config = self._config
        limits = {name: one.max_new_tokens for name, one in config.data.sources.items()}
        source = SavedRollouts(
            Path(str(replayed_run(config))), config.options(GRPOConfig), config.generation.max_new_tokens, limits
        )
        groups = [policy.group, *([] if teacher is None else [teacher.group])]
        loop = self._loop(metrics, start, policy, teacher, source, lambda: groups, callbacks)
        loop.run()
        return self._finish(policy, loop.steps, groups)


def replay(run: Path, first: int, count: int, overrides: Sequence[str], sweeps: bool) -> Path:
    """Replay `count` steps of a run from the step `first`, and print both runs' metrics. Return the folder of the
    replay, or of all replays of a sweep. Earlier steps up to the newest checkpoint are repeated unchanged.

    Raises:
        ConfigError: an override cannot be honoured, or the run has no rollout of a step.
    """
    run, config = run.resolve(), read_json(run / CONFIG_FILE)
    start, saved = _checkpoint_before(run, config, first)
    _check(run, config, overrides, range(start + 1, first + count), first)
    console, name = RunConsole(), f"{config['run_name']}-replay-{first}"
    folder = Path("outputs") / name / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    key = SWEEP_FOLDER if sweeps else RUN_FOLDER
    for own in jobs(overrides):
        compose_config(expanded(as_words(_arguments(run, name, first, saved, {}, own))))
    if start < first - 1:
        steps = f"step {first - 1}" if start == first - 2 else f"steps {start + 1} to {first - 1}"
        console.say(f"{steps} again, unchanged, from {f'the checkpoint of step {start}' if start else 'the start'}")
        free = [one for one in overrides if is_of(given_keys([one])[0], _FREE) and values_of(one) == [one]]
        own = {RUN_FOLDER: str(folder / _BEFORE), "checkpoint.save_period": first - 1, "logger.plots": False}
        launch(_arguments(run, name, first - 1, saved, own, free))
        saved = folder / _BEFORE
    arguments = _arguments(run, name, first + count - 1, saved, {key: str(folder)}, overrides)
    launch([*(["-m"] if sweeps else []), *arguments])
    _compare(run, folder, overrides if sweeps else (), range(first, first + count), console)
    return folder


def _checkpoint_before(run: Path, config: Mapping[str, Any], first: int) -> tuple[int, Path | None]:
    """Return step and folder of the run's newest checkpoint before a step; those of its start if there is none."""
    found = CheckpointStore(run / CHECKPOINTS).complete()
    if before := [one for one in found if one.step < first]:
        return before[-1].step, before[-1].path
    named = config.get("checkpoint", {}).get("resume_from")
    begun = None if named is None else locate(Path(named))
    return (0, None) if begun is None else (begun.step, begun.path)


def _check(run: Path, config: Mapping[str, Any], overrides: Sequence[str], steps: range, first: int) -> None:
    name = config.get("algorithm", {}).get("name")
    if name not in ALGORITHMS or not issubclass(ALGORITHMS[name].options, GRPOConfig):
        rule = f"{run} has no rollouts to replay"
        raise ConfigError([Violation("algorithm", name, rule, "name a run of GRPO or distillation")])
    there = [step_of(file) for file in rollout_files(run) if file.stem.endswith("train")]
    if missing := [step for step in steps if step not in there]:
        rule = f"{run} has no rollout of step {missing[0]}"
        fix = f"steps from {min(there)} to {max(there)}" if there else "a run with logger.log_samples=null"
        asked = ("--step", first) if missing[0] <= first else ("--steps", steps[-1] - first + 1)
        raise ConfigError([Violation(*asked, rule, fix)])
    wrong = [
        Violation(key, one.partition("=")[2], f"a replay has the rollouts of {run}", _instead(run, key, one))
        for one in overrides
        for key in given_keys([one])
        if is_of(key, _FIXED)
    ]
    if wrong:
        raise ConfigError(wrong)


def _instead(run: Path, key: str, override: str) -> str:
    """Return the fix for an override that a replay cannot honour."""
    return "--steps N" if key.startswith("algorithm.max_num_") else f"train --like {run} {override}"


def _arguments(
    run: Path, name: str, last: int, saved: Path | None, own: Mapping[str, Any], overrides: Sequence[str]
) -> list[str]:
    """Return the command line of a replay up to the step `last`. `overrides` win."""
    values = {
        "run_name": name,
        "algorithm.rollouts.replay": str(run),
        "algorithm.max_num_steps": last,
        "algorithm.max_num_epochs": None,
        **dict.fromkeys(("algorithm.val_at_start", "algorithm.val_at_end"), False),
        "algorithm.val_period": 0,
        "checkpoint.resume_from": None if saved is None else str(saved),
        "checkpoint.export_hf_at_end": False,
        "checkpoint.save_period": 0,
        "checkpoint.push_to_hub": None,
        **own,
    }
    given = {key for one in overrides for key in given_keys([one])}
    return ["--like", str(run), *(as_override(*one) for one in values.items() if one[0] not in given), *overrides]


def _compare(run: Path, folder: Path, swept: Sequence[str], steps: range, console: RunConsole) -> None:
    """Print the metrics of the run and its replays by step."""
    columns = {"the run": run}
    if swept:
        several = tuple(f"{one.partition('=')[0]}=" for one in swept if values_of(one) != [one])
        for number, own in enumerate(jobs(swept)):
            # The last part of a key keeps the table narrow.
            changed = [one.rpartition("=")[0].rpartition(".")[2] + "=" + one.rpartition("=")[2] for one in own]
            shown = [name for name, one in zip(changed, own, strict=True) if one.startswith(several)]
            columns[" ".join(shown)] = folder / str(number)
    else:
        columns["replay"] = folder
    found = [metrics_by_step(one) for one in columns.values()]
    rows = [
        [str(step), name, _shown(values[0]), *(_shown(one) + " =" * (one == values[0]) for one in values[1:])]
        for step in steps
        for name in _COMPARED
        for values in [[own.get(step, {}).get(f"train/{name}") for own in found]]
        if any(one is not None for one in values)
    ]
    console.table("replay (=: identical to the run)", ["step", "metric", *columns], rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
