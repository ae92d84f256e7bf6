"""`python -m nemo_rl_lite.quickstart [overrides]`: the main job from nothing, with a last line for machines."""

import shutil
import sys
import time
from collections.abc import Sequence

from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.embedded.reverse_digits import NAME, embedded_folder
from nemo_rl_lite.rules.compose import compose_config
from nemo_rl_lite.run.command import fail, launch, split_arguments

# Not the process' own start: scripts/quickstart.sh becomes this process after it has set up the machine.
STARTED = time.perf_counter()


def main() -> None:
    """Warm start and GRPO on the embedded task; the arguments are those of `nemo_rl_lite.train`."""
    arguments = sys.argv[1:]
    flags, overrides = split_arguments(arguments)
    if not flags:
        _forget_warm_start(overrides)
    for summary in launch(arguments):
        seconds = time.perf_counter() - STARTED
        before, after = (
            "none" if accuracy is None else f"{accuracy:.3f}"
            for accuracy in (summary.accuracy_before, summary.accuracy_after)
        )
        sys.stdout.write(
            f"RESULT accuracy_before={before} accuracy_after={after} seconds={seconds:.1f} steps={summary.steps} "
            f"run={summary.run_folder}\n"
        )


def _forget_warm_start(overrides: Sequence[str]) -> None:
    """The warm start is part of the job, so one that is left from an earlier run is made anew."""
    try:
        config = compose_config(overrides)
    except ConfigError as error:
        fail(error)
    if config.policy.model_name == NAME:
        shutil.rmtree(embedded_folder(config), ignore_errors=True)


if __name__ == "__main__":
    main()
