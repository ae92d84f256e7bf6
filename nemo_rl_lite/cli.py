"""`nrl-lite VERB ...`: each verb also runs as `python -m nemo_rl_lite.VERB`."""

import difflib
import runpy
import sys

VERBS = (
    *("train", "plan", "slurm", "runs", "status", "tail", "stop"),
    *("quickstart", "export", "evaluate", "chat", "serve", "report", "doctor", "constraints"),
)
USAGE = """usage: nrl-lite VERB [arguments]

  train        one training run: group=file and key.path=value overrides; `nrl-lite train --help` lists them
  plan         what a run needs and whether it fits, without a GPU, in seconds; arguments as for train
  slurm        the same run as a Slurm job: prints a script for sbatch, or submits it; resumes after a time limit
  runs         a table of the runs below outputs/: state, step, reward or loss, seconds a step
  status       what a run does now, how far it is, its memory, checkpoint and problems; RUN, a name, or last
  tail         the console of a run as it is written, until the run ends
  stop         end a run after its current step, with a checkpoint, from any machine that sees its folder
  export       a run's checkpoint as a Hugging Face folder, read back and compared with the checkpoint
  evaluate     avg@k and pass@k of a run's model, or of a Hugging Face folder, on held-out problems
  chat         a conversation with a run's model in the terminal
  serve        an OpenAI-compatible endpoint of a run's model, until Ctrl-C
  report       one HTML page of one or several runs: curves, times, memory, samples, configuration
  quickstart   the embedded example, in two minutes on two CPU cores
  doctor       checks of this machine and its packages, with the fix for each problem
  constraints  the file with the tested versions of all packages, for pip install -c
"""


def main() -> None:
    """The console script."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("--help", "-h"):
        sys.stdout.write(USAGE)
    elif verb in VERBS:
        sys.argv = [f"nrl-lite {verb}", *sys.argv[2:]]
        # Import only this verb: `doctor` must run where packages of the other verbs are missing.
        runpy.run_module(f"nemo_rl_lite.{verb}", run_name="__main__")
    else:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        sys.stderr.write(f"nrl-lite: there is no verb '{verb}'{hint}\n\n{USAGE}")
        sys.exit(2)


if __name__ == "__main__":
    main()
