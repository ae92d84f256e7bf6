"""Do everything that a run does before it starts a process: configuration, data, plan."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.markup import escape

from nemo_rl_lite.checkpoint.resume import changed, find_start
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.environment import described
from nemo_rl_lite.planning.budget import size
from nemo_rl_lite.planning.gpus import size_of
from nemo_rl_lite.planning.page import make_plan, show_plan
from nemo_rl_lite.run.folder import LOCK_FILE, check_folder, locked
from nemo_rl_lite.run.job import make_job
from nemo_rl_lite.run.model import starting_model, with_chosen_template, with_teacher
from nemo_rl_lite.validation.compose import default_values


def dry_run(config: Config, overrides: Sequence[str], run_folder: Path | None) -> None:
    """Print the differences from the defaults, read and check the data, print the plan. Starts no worker, and writes
    only to the caches of models and data. `run_folder`: the folder that the command names, if any.

    Raises:
        LauncherError: an error that would end the run before its first process.
    """
    console = RunConsole()
    # Values such as [aeiou] look like markup.
    rows = [[escape(cell) for cell in row] for row in differences(config)]
    console.table("differences from the defaults", ["", "default", "here"], rows)
    whole_config = described(config)
    with tempfile.TemporaryDirectory() as empty:
        folder = run_folder or Path(empty)
        check_folder(folder, whole_config)
        if (folder / LOCK_FILE).exists():
            # Another process may be running there.
            with locked(folder):
                pass
        for line in find_start(config, whole_config, folder, console.busy).lines():
            console.say(line)
        model = starting_model(config, console, untrained=Path(empty))
        model = with_chosen_template(config, model, Path(empty), console.say)
        make_job(with_teacher(config, console, untrained=Path(empty)), Path(empty), console, model)
    runs_here = not on_gpus(config) and config.cluster.num_nodes == 1
    there = psutil.virtual_memory().total if runs_here else None
    plan = make_plan(config, overrides, find_shape(config.policy.model_name), size_of(None), there)
    show_plan(plan, console)
    if there is not None and not plan.fits:
        rule = f"the run needs {size(plan.budget.host)} of memory, and this machine has {size(there)}"
        batch = plan.micro_batch
        smaller = "less offload" if on_gpus(config) else f"a smaller {batch.key} (now {batch.now})"
        shorter = f"policy.max_total_sequence_length (now {config.policy.max_total_sequence_length})"
        fix = f"{smaller} or {shorter}, fewer ranks or engines, or a smaller model"
        raise ConfigError([Violation("policy", None, rule, fix)])
    console.say("dry run: nothing was started")


def differences(config: Config) -> list[list[str]]:
    """List key, default and value of every key that differs from the algorithm's defaults."""
    defaults = default_values(config.algorithm.name)
    changes = changed(defaults, dataclasses.asdict(config), but_for=())
    return [[key, repr(before), repr(now)] for key, (before, now) in changes.items()]
