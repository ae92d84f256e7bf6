"""`nrl-lite COMMAND ...`, also `python -m nemo_rl_lite COMMAND ...`."""

import difflib
import os
import runpy
import sys
from pathlib import Path

from nemo_rl_lite import __version__

# Each command is a module of this package.
VERBS = {
    "init": "write an example experiment, reward and rows to start from; it trains on a CPU",
    "train": "train a model: FILE.yaml, group=file and key.path=value; `nrl-lite train --help` lists them",
    "plan": "predict memory and step time, and whether a run fits; needs no GPU; arguments as for train",
    "choose": "measure engine settings, and print the fastest within a mismatch budget; arguments as for train",
    "rehearse": "play scripted episodes to find faults of agent, environment and reward; arguments as for train",
    "slurm": "print or submit an sbatch script for a run; it resumes after a time limit",
    "keys": "search configuration keys: range, default, meaning",
    "runs": "list the runs below outputs/: state, step, reward or loss, seconds per step",
    "status": "show a run: current phase, progress, memory, checkpoint, problems",
    "tail": "follow the console output of a run until it ends",
    "stop": "stop a run after its current step, with a checkpoint, from any machine that sees its folder",
    "engines": "end or start engines of a run: RUN N",
    "export": "write a checkpoint as a Hugging Face folder, and verify it",
    "evaluate": "measure avg@k and pass@k of a model on held-out problems",
    "chat": "chat with a model in the terminal",
    "serve": "serve a model over the APIs of OpenAI and Anthropic until Ctrl-C",
    "why": "take a step's loss apart by prompt, sample and token: one HTML page",
    "replay": "take steps of a run again from its saved rollouts with other settings; needs no engine",
    "capsule": "write one file with which the first steps of a run can be repeated and compared",
    "rerun": "repeat the steps of a capsule, and name the first thing that differs",
    "report": "write an HTML page of runs: curves, times, memory, samples, configuration",
    "compare": "say whether new runs are better than base runs, with an interval: A ... vs B ...",
    "quickstart": "run the embedded example: two minutes on two CPU cores",
    "doctor": "check this machine, or attack the reward of a configuration; a fix for each problem",
    "constraints": "print the path of the tested package versions, for pip install -c",
}


def main() -> None:
    """Run the command that the first argument names."""
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
            # Torch reads this on import; otherwise it prints lines about NUMA nodes.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        find_modules_here()
        # Import only this command: `doctor` must run without the packages of the others.
        runpy.run_module(f"nemo_rl_lite.{verb}", run_name="__main__")
    else:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        sys.stderr.write(f"nrl-lite: unknown command '{verb}'{hint}\n\n{usage()}")
        sys.exit(2)


def usage() -> str:
    verbs = "\n".join(f"  {verb:11}  {what}" for verb, what in VERBS.items())
    tab = "Tab completion: source <(nrl-lite --completion bash), or zsh; put it into ~/.bashrc or ~/.zshrc"
    return f"usage: nrl-lite COMMAND [arguments]\n\n{verbs}\n\n{tab}\n"


def find_modules_here() -> None:
    """Put the current folder first on the path, as `python -m` does. Ray and the process pools inherit the path."""
    if not sys.flags.safe_path and sys.path[0] != str(Path.cwd()):
        sys.path.insert(0, str(Path.cwd()))


if __name__ == "__main__":
    main()
