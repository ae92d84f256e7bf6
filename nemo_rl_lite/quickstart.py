"""`nrl-lite quickstart [overrides]`: run the embedded example and print a RESULT line for scripts."""

import sys
import time

from nemo_rl_lite.run.command import launch

# Time of import: scripts/quickstart.sh becomes this process after the set-up.
STARTED = time.perf_counter()


def main() -> None:
    """Run warm start and GRPO on the embedded task, with the arguments of `nrl-lite train`."""
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
