"""`nrl-lite export RUN [FOLDER]`: write a checkpoint as a Hugging Face folder."""

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from nemo_rl_lite.checkpoint.resume import checkpoints_around, locate
from nemo_rl_lite.checkpoint.store import POLICY, Checkpoint, explained
from nemo_rl_lite.compat.imports import quick_imports
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import CheckpointError, ConfigError, Violation, shown_as_message
from nemo_rl_lite.models.folder import (
    SHARD_BYTES,
    TEMPLATE_FILE,
    TEMPLATED,
    exported,
    locate_model,
    with_template,
)
from nemo_rl_lite.models.shape import push_problems
from nemo_rl_lite.observability.runs import existing_or_run
from nemo_rl_lite.system.machine import local_path
from nemo_rl_lite.validation.compose import restore

_MEGABYTE = 10**6


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 done, 1 failed, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite export", description=__doc__)
    parser.add_argument(
        "run", type=local_path, help="a run (its folder, its name or last) for its newest checkpoint, or a checkpoint"
    )
    parser.add_argument(
        "folder",
        type=local_path,
        nargs="?",
        help="folder to write (default: hf-step-N in the run's folder); LoRA's adapters go to FOLDER-adapter",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default=SHARD_BYTES,
        metavar="SIZE",
        help="maximum size of a file of weights, such as 500MB or 2GB (default: 5GB)",
    )
    parser.add_argument("--push-to-hub", metavar="NAME", help="also upload to this Hub repository (organisation/name)")
    parser.add_argument("--public", action="store_true", help="create the repository as public, not private")
    given = parser.parse_intermixed_args(arguments)
    with shown_as_message("nrl-lite export"):
        name = given.push_to_hub
        if name and (violations := [Violation("--push-to-hub", name, *problem) for problem in push_problems(name)]):
            raise ConfigError(violations)
        target = given.folder.resolve() if given.folder else None
        folders = export(existing_or_run(given.run).resolve(), target, given.max_shard_size)
        if name:
            from nemo_rl_lite.run.publish import push

            sys.stdout.write(f"pushed to {push(folders, name, private=not given.public)}\n")


def _size(text: str) -> int:
    """Parse a number of bytes with a unit; without one, at least a megabyte. Raises argparse.ArgumentTypeError."""
    try:
        found = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        found = 0
    if found <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 2GB")
    if text.strip().isdecimal() and found < _MEGABYTE:
        raise argparse.ArgumentTypeError(f"{text} means bytes; write {text}MB or {text}GB")
    return int(found)


def export(run: Path, target: Path | None, shard_bytes: int) -> list[Path]:
    """Write a run's newest checkpoint, or one checkpoint, to `target` and verify it; return the `exported` folders.

    Raises:
        CheckpointError: no checkpoint; a checkpoint of another version of this package; a target among checkpoints; the
            starting model is missing; the written model's logprobs differ.
    """
    found = locate(run)
    if found is None:
        raise CheckpointError(f"{run} has no complete checkpoint: name a run's folder, or one in its checkpoints/")
    if target is not None and (checkpoints := checkpoints_around(target)):
        raise CheckpointError(f"{target} is inside a run's checkpoints, {checkpoints}: name a folder outside")
    config, named = _saved_config(found), target is not None
    target = target or found.path.parents[1] / f"hf-{found.path.name}"
    written = exported(config, target)
    for folder in written if named else ():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} exists and is not empty: name another folder, or remove it")
    # Hide the libraries' warnings; many warn on import.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with quick_imports():
        import transformers

        from nemo_rl_lite.compat.megatron import auto_bridge

        auto_bridge()
    from nemo_rl_lite.observability.console import RunConsole
    from nemo_rl_lite.policy.hf_folder import convert
    from nemo_rl_lite.run.publish import write_cards
    from nemo_rl_lite.system.machine import free_port

    transformers.utils.logging.disable_progress_bar()
    console = RunConsole()
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in place.items()})
    model = locate_model(config, console)
    if not (model / "config.json").exists():
        rule = "does not exist; the export needs its tokenizer and, with LoRA, its weights"
        raise CheckpointError(f"{model}, the starting model (policy.model_name), {rule}")
    with tempfile.TemporaryDirectory() as scratch:
        if config.policy.tokenizer.chat_template:
            template = found.path.parents[1] / TEMPLATED / TEMPLATE_FILE
            if not template.is_file():
                raise CheckpointError(f"{template}, the run's chat template, does not exist: restore it")
            model = with_template(model, template, Path(scratch) / TEMPLATED)
        try:
            difference = convert(config, model, found.path / POLICY, target, console.say, shard_bytes)
        except CheckpointError as error:
            raise explained(error, found.path) from error.__cause__
    write_cards(target, config, found.path.parents[1], found.step)
    shown = " and ".join(map(str, written))
    console.say(f"step {found.step} -> {shown}; transformers' logprobs differ by {difference:.2g} nats on average")
    return written


def _saved_config(found: Checkpoint) -> Config:
    if "config" not in found.record:
        raise CheckpointError(f"{found.path} does not record its configuration")
    try:
        return restore(json.dumps(found.record["config"]))
    except ConfigError as error:
        # The fixes are keys of a command line, which cannot help here.
        wrong = ", ".join(f"{one.key} {one.rule}" for one in error.violations)
        version = "was saved by another version of the launcher, and only that one exports it"
        raise CheckpointError(f"{found.path} {version}: {wrong}") from None


if __name__ == "__main__":
    main()
