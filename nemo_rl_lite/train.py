"""`nrl-lite train [group=file ...] [key.path=value ...]`: compose and validate a configuration, and run it."""

import sys
from collections.abc import Sequence

from nemo_rl_lite.system.stopping import interrupt_on_signals, interrupted_status


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Exit status: 0 done, 1 failed, 2 bad configuration or data, 3 a worker failed, 4 a refit failed, 75 stopped with a
    checkpoint, 130 interrupted.
    A sweep ends with the status of its first failed job.
    """
    interrupt_on_signals()
    try:
        # Signals during this import, which takes a second, are not lost.
        from nemo_rl_lite.run.command import launch

        launch(sys.argv[1:] if arguments is None else list(arguments), owns_process=True)
    except ModuleNotFoundError as error:
        if error.name != "hydra":
            raise
        sys.exit(
            "nemo_rl_lite is not installed for this Python: bash scripts/install.sh, then source .venv/bin/activate"
        )
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted before the run began\n")
        sys.exit(interrupted_status(saves=True))


if __name__ == "__main__":
    main()
