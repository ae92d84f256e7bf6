"""`nrl-lite VERB ...`: each verb also runs as `python -m nemo_rl_lite VERB`."""

import difflib
import os
import runpy
import sys
from pathlib import Path

from nemo_rl_lite import __version__

# Each verb is a module of this package.
VERBS = {
    "init": "writes an experiment of your own, with a reward and rows, that trains at once on a CPU",
    "train": "one training run: your FILE.yaml, group=file and key.path=value; `nrl-lite train --help` lists them",
    "plan": "what a run needs and whether it fits, without a GPU, in seconds; arguments as for train",
    "slurm": "the same run as a Slurm job: prints a script for sbatch, or submits it; resumes after a time limit",
    "keys": "keys by a word: range, default and what they do",
    "runs": "a table of the runs below outputs/: state, step, reward or loss, seconds per step",
    "status": "what a run does now, how far it is, its memory, checkpoint and problems; RUN, a name, or last",
    "tail": "the console of a run as it is written, until the run ends",
    "stop": "end a run after its current step, with a checkpoint, from any machine that sees its folder",
    "export": "a run's checkpoint as a Hugging Face folder, read back and compared with the checkpoint",
    "evaluate": "avg@k and pass@k of a run's model, or of a Hugging Face folder, on held-out problems",
    "chat": "a conversation with a run's model in the terminal",
    "serve": "an OpenAI-compatible endpoint of a run's model, until Ctrl-C",
    "report": "one HTML page of one or several runs: curves, times, memory, samples, configuration",
    "quickstart": "the embedded example, in two minutes on two CPU cores",
    "doctor": "checks of this machine and its packages, with the fix for each problem",
    "constraints": "the file with the tested versions of all packages, for pip install -c",
}


def main() -> None:
    """The console script."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("--help", "-h"):
        sys.stdout.write(usage())
    elif verb in ("--version", "-V"):
        sys.stdout.write(f"nemo_rl_lite {__version__}\n")
    elif verb == "--completion":
        from nemo_rl_lite.config.completion import SHELLS, script

        shell = sys.argv[2] if len(sys.argv) == 3 else ""
        if shell not in SHELLS:
            sys.stderr.write("usage: nrl-lite --completion bash|zsh\n")
            sys.exit(2)
        sys.stdout.write(script(shell, VERBS))
    elif verb in VERBS:
        sys.argv = [f"nrl-lite {verb}", *sys.argv[2:]]
        if verb in ("chat", "serve"):
            # Torch reads this where it is imported; else an answer begins with lines on NUMA nodes.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        find_modules_here()
        # Import only this verb: `doctor` must run where packages of the other verbs are missing.
        runpy.run_module(f"nemo_rl_lite.{verb}", run_name="__main__")
    else:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        sys.stderr.write(f"nrl-lite: there is no verb '{verb}'{hint}\n\n{usage()}")
        sys.exit(2)


def usage() -> str:
    """Return the help of the command."""
    verbs = "\n".join(f"  {verb:11}  {what}" for verb, what in VERBS.items())
    tab = "Tab completion: source <(nrl-lite --completion bash), or zsh; put it into ~/.bashrc or ~/.zshrc"
    return f"usage: nrl-lite VERB [arguments]\n\n{verbs}\n\n{tab}\n"


def find_modules_here() -> None:
    """Put the current folder first on the path, as `python -m` does. Ray and the process pools pass the path on."""
    if not sys.flags.safe_path and sys.path[0] != str(Path.cwd()):
        sys.path.insert(0, str(Path.cwd()))


if __name__ == "__main__":
    main()
