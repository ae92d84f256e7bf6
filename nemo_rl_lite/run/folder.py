"""A run's folder, before anything is run in it: whether it may be, and that no other process does."""

import fcntl
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nemo_rl_lite.checkpoint.resume import CHECKPOINTS, changed
from nemo_rl_lite.checkpoint.store import has_any
from nemo_rl_lite.config.overrides import RUN_FOLDER
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.observability.metrics_log import METRICS_FILE
from nemo_rl_lite.observability.summary import SUMMARY_FILE
from nemo_rl_lite.run.status import CONFIG_FILE, running_process, write_start

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
# A run that is done goes on where it was given more of these.
_LENGTH = {"algorithm.max_num_steps", "algorithm.max_num_epochs"}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Around a run: no other process runs in the folder. However this one ends, the lock ends with it: programs that it
    starts do not inherit the file.

    Raises:
        ConfigError: another process is running there.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context((folder / LOCK_FILE).open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = f"another process is running there{running_process(folder)}"
            fix = "wait for it, end it, or name another folder"
            raise ConfigError([Violation(RUN_FOLDER, str(folder), rule, fix)]) from None
        except OSError as error:
            log.warning("%s cannot be locked against a second run in it: %s", folder, error)
        yield


def check_folder(folder: Path, whole_config: Mapping[str, Any]) -> None:
    """Raises ConfigError: the folder holds another run, or one that is done."""
    if not (folder / METRICS_FILE).exists():
        return
    changes = changed(_written(folder / CONFIG_FILE), json.loads(json.dumps(whole_config))).keys()
    if (folder / SUMMARY_FILE).exists() and not (changes and changes <= _LENGTH):
        rule = "holds a run already, and it is done"
        fix = f"name another folder, or change nothing but {' or '.join(sorted(_LENGTH))} to go on with it"
        raise ConfigError([Violation(RUN_FOLDER, str(folder), rule, fix)])
    if changes and not has_any(folder / CHECKPOINTS):
        rule = "holds a run already, without a checkpoint; a second one would be mixed into it"
        raise ConfigError([Violation(RUN_FOLDER, str(folder), rule, "name another folder, or remove this one")])


def write_down(folder: Path, whole_config: Mapping[str, Any], command: str) -> None:
    """Write down what is run in a folder that was checked."""
    # Written again when the run is done.
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    write_start(folder, whole_config, command)


def _written(file: Path) -> dict[str, Any]:
    """A configuration that was written down; nothing where that was cut short."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
