"""`nrl-lite train [group=file ...] [key.path=value ...]`: compose, validate, run."""

import sys
from collections.abc import Sequence

from nemo_rl_lite.system.stopping import interrupt_on_signals, interrupted_status


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line.

    Exit status: 0 done, 1 failed, 2 bad configuration or data, 3 a worker failed, 4 a refit failed, 75 stopped with a
    checkpoint, 130 interrupted; of a sweep, that of the first job that failed.
    """
    interrupt_on_signals()
    try:
        # A signal in the second that this takes is not lost either.
        from nemo_rl_lite.run.command import launch

        launch(sys.argv[1:] if arguments is None else list(arguments))
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
