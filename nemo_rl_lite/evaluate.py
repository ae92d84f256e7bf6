"""`nrl-lite evaluate MODEL [options] [group=file ...] [key.path=value ...]`: measure avg@k and pass@k on held-out
problems, with confidence intervals.

MODEL is a run (its folder, its name or last), a Hugging Face folder or a Hub model ID. After an interrupt, the same
command continues.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_lite.errors import LauncherError, WorkerError, shown_as_message
from nemo_rl_lite.system.machine import close_to_others, local_path
from nemo_rl_lite.system.stopping import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 done, 1 failed, 2 bad configuration or arguments, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="nrl-lite evaluate", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", type=Path, help="a run, a Hugging Face folder or a Hub model ID")
    parser.add_argument(
        "overrides", nargs="*", help="as for train; of data, reward, environment, agent, generation, the chat template"
    )
    parser.add_argument("--samples", metavar="K", type=int, default=1, help="responses per problem (default: 1)")
    parser.add_argument("--problems", metavar="N", type=int, help="the first N problems (default: all; 300 of a task)")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy (default: generation.temperature)")
    parser.add_argument(
        "--pass-reward", metavar="R", type=float, default=1.0, help="minimum reward that passes (default: 1)"
    )
    parser.add_argument("--source", metavar="NAME", help="the source, for a run with data.sources")
    parser.add_argument("--output", metavar="FOLDER", type=local_path, help="default: outputs/evaluations/...")
    given = parser.parse_intermixed_args(arguments)
    with shown_as_message("nrl-lite evaluate"):
        from nemo_rl_lite.config.names import in_our_names
        from nemo_rl_lite.evaluation.evaluate import evaluate
        from nemo_rl_lite.evaluation.task import Options, compose
        from nemo_rl_lite.observability.console import RunConsole
        from nemo_rl_lite.run.serving import find_model
        from nemo_rl_lite.validation.notes import show_notes

        show_notes(in_our_names(given.overrides)[1])
        console = RunConsole()
        options = Options(given.samples, given.problems, given.temperature, given.pass_reward, given.source)
        evaluation = compose(find_model(given.model, console.say), given.overrides, options)
        folder = given.output or evaluation.usual_folder()
        resume = f"the same command continues from {folder}"
        try:
            evaluate(evaluation, folder, console)
        except KeyboardInterrupt:
            sys.stderr.write(f"interrupted: {resume}\n")
            sys.exit(INTERRUPTED)
        except WorkerError as error:
            raise _Ended(f"{error}; {resume}") from error


class _Ended(LauncherError):
    exit_status = WorkerError.exit_status


if __name__ == "__main__":
    # Before Ray is imported.
    close_to_others()
    main()
