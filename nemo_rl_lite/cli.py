"""`nrl-lite VERB ...`: each verb also runs as `python -m nemo_rl_lite.VERB`."""

import sys

from nemo_rl_lite import export, quickstart, slurm, train

VERBS = {"train": train.main, "slurm": slurm.main, "quickstart": quickstart.main, "export": export.main}
USAGE = """usage: nrl-lite VERB [arguments]

  train        one training run: group=file and key.path=value overrides; `nrl-lite train --help` lists them
  slurm        the same run as a Slurm job: prints a script for sbatch, or submits it; goes on after a time limit
  export       a run's checkpoint as a Hugging Face folder, read back and compared before it is there
  quickstart   the embedded example from nothing, in two minutes on two CPU cores
"""


def main() -> None:
    """The console script."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("--help", "-h"):
        sys.stdout.write(USAGE)
    elif verb in VERBS:
        sys.argv = [f"nrl-lite {verb}", *sys.argv[2:]]
        VERBS[verb]()
    else:
        sys.stderr.write(f"nrl-lite: there is no verb '{verb}'\n\n{USAGE}")
        sys.exit(2)


if __name__ == "__main__":
    main()
