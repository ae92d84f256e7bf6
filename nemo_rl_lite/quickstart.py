"""`nrl-lite quickstart [overrides]`: run the embedded example, and print a last line for scripts."""

import sys
import time

from nemo_rl_lite.run.command import launch

# The time of this import: scripts/quickstart.sh becomes this process after it has set up the machine.
STARTED = time.perf_counter()


def main() -> None:
    """Run warm start and GRPO on the embedded task. The arguments are those of `nemo_rl_lite.train`."""
    for summary in launch(sys.argv[1:]):
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
