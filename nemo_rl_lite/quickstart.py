"""`python -m nemo_rl_lite.quickstart [overrides]`: the main job from nothing, with a last line for machines."""

import shutil
import sys
import time

import psutil

from nemo_rl_lite.config.compose import compose_config
from nemo_rl_lite.embedded.reverse_digits import embedded_folder
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.train import fail, launch


def main() -> None:
    """Warm start and GRPO on the embedded task; the arguments are those of `nemo_rl_lite.train`."""
    try:
        config = compose_config(sys.argv[1:])
    except ConfigError as error:
        fail(error)
    # The warm start is part of the job, so one that is left from an earlier run is made anew.
    shutil.rmtree(embedded_folder(config), ignore_errors=True)
    for summary in launch(sys.argv[1:]):
        seconds = time.time() - psutil.Process().create_time()
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
