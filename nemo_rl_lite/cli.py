"""`nrl-lite VERB ...`: each verb also runs as `python -m nemo_rl_lite.VERB`."""

import sys

from nemo_rl_lite import export, quickstart, report, train

VERBS = {"train": train.main, "quickstart": quickstart.main, "export": export.main, "report": report.main}
USAGE = """usage: nrl-lite VERB [arguments]

  train        one training run: group=file and key.path=value overrides; `nrl-lite train --help` lists them
  export       a run's checkpoint as a Hugging Face folder, read back and compared before it is there
  report       one HTML page of one run or several: curves, times, memory, samples, configuration
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
