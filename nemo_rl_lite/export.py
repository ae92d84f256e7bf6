"""`python -m nemo_rl_lite.export RUN [FOLDER]`: a checkpoint as a Hugging Face folder."""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_lite.checkpoint.resume import POLICY, locate
from nemo_rl_lite.checkpoint.store import Checkpoint
from nemo_rl_lite.errors import CheckpointError, LauncherError
from nemo_rl_lite.rules.compose import restore


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit status: 0 done, 1 failed, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite export", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder (its newest checkpoint is taken), or one checkpoint's")
    parser.add_argument("folder", type=Path, nargs="?", help="what to write (default: hf-step-N in the run's folder)")
    given = parser.parse_args(arguments)
    try:
        export(given.run.resolve(), given.folder.resolve() if given.folder else None)
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_status)
    except OSError as error:
        sys.stderr.write(f"nrl-lite export: {error}\n")
        sys.exit(LauncherError.exit_status)


def export(run: Path, target: Path | None) -> Path:
    """Write the newest checkpoint of a run, or one checkpoint, to `target`, checked; returns the folder.

    Raises:
        CheckpointError: there is none, the model that it started from is not there any more, or what was written does
            not compute the same.
        ConfigError: its configuration is of another version of this package.
    """
    found = locate(run)
    if found is None:
        raise CheckpointError(f"{run} has no complete checkpoint: name a run's folder, or one in its checkpoints/")
    if target is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already, and is not empty: name another folder, or remove it")
    target = target or found.path.parents[1] / f"hf-{found.path.name}"
    config = restore(json.dumps(_saved_config(found)))
    import transformers

    from nemo_rl_lite.host.ports import free_port
    from nemo_rl_lite.models.source import locate_model
    from nemo_rl_lite.observability.console import RunConsole
    from nemo_rl_lite.policy.megatron.cpu_shim import prepare_import

    prepare_import()
    from nemo_rl_lite.policy.megatron.conversion import convert

    # The libraries' own progress.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    console = RunConsole()
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in place.items()})
    model = locate_model(config, console)
    if not (model / "config.json").exists():
        rule = "which has the tokenizer and, with LoRA, the weights, is not there"
        raise CheckpointError(f"{model}, the model that the run started from (policy.model_name), {rule}")
    difference = convert(config, model, found.path / POLICY, target, console.say)
    console.say(f"step {found.step} -> {target}; transformers' logprobs differ by {difference:.2g} nats on average")
    return target


def _saved_config(found: Checkpoint) -> object:
    if "config" not in found.record:
        raise CheckpointError(f"{found.path} does not say which configuration it was saved with")
    return found.record["config"]


if __name__ == "__main__":
    main()
