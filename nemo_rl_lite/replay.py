"""`nrl-lite replay RUN --step K [--steps N] [-m] [group=file ...] [key.path=value ...]`: what if.

Takes steps of a run again from its saved rollouts and a checkpoint, with another loss, learning rate or precision, and
without engines. Prints the metrics of both. With -m, one replay per value: -m algorithm.loss_fn.ratio_clip_max=0.2,0.4
"""

import argparse
import sys
from collections.abc import Sequence

from nemo_rl_lite.errors import UsageError, shown_as_message
from nemo_rl_lite.system.machine import close_to_others, local_path
from nemo_rl_lite.system.stopping import interrupt_on_signals, interrupted_status


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: as for train."""
    parser = argparse.ArgumentParser(prog="nrl-lite replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=local_path, help="a run's folder or name, or last")
    parser.add_argument(
        "overrides", nargs="*", help="as for train; not of data, reward, environment, agent, generation"
    )
    parser.add_argument("--step", metavar="K", type=int, required=True, help="the first step")
    parser.add_argument("--steps", metavar="N", type=int, default=1, help="number of steps (default: 1)")
    parser.add_argument("-m", "--multirun", action="store_true", help="one replay per value")
    given = parser.parse_intermixed_args(arguments)
    interrupt_on_signals()
    try:
        with shown_as_message("nrl-lite replay"):
            for name, value in (("--step", given.step), ("--steps", given.steps)):
                if value < 1:
                    raise UsageError(f"{name} {value}: must be at least 1")
            from nemo_rl_lite.observability.runs import find_run
            from nemo_rl_lite.run.replay import replay

            folder = replay(find_run(str(given.run)), given.step, given.steps, given.overrides, given.multirun)
            sys.stdout.write(f"{folder}\n")
    except KeyboardInterrupt:
        sys.exit(interrupted_status(saves=True))


if __name__ == "__main__":
    # Before Ray is imported.
    close_to_others()
    main()
