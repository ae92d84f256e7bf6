"""`nrl-lite quickstart [overrides]`: run the embedded example, and print a last line for scripts."""

import shutil
import sys
import time

from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.embedded import NAME, embedded_folder
from nemo_rl_lite.run.command import fail, launch, split_arguments
from nemo_rl_lite.validation.compose import compose_config

# The time of this import: scripts/quickstart.sh becomes this process after it has set up the machine.
STARTED = time.perf_counter()


def main() -> None:
    """Run warm start and GRPO on the embedded task. The arguments are those of `nemo_rl_lite.train`."""
    arguments = sys.argv[1:]
    flags, overrides = split_arguments(arguments)
    if not flags.given:
        try:
            config = compose_config(overrides)
        except ConfigError as error:
            fail(error)
        if config.policy.model_name == NAME:
            # The job includes the warm start: an earlier run's is made again.
            shutil.rmtree(embedded_folder(config), ignore_errors=True)
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


if __name__ == "__main__":
    main()
