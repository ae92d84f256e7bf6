"""`nrl-lite why RUN --step K [--sample S ...]`: take a step's loss apart by prompt, sample and token.

Writes one HTML page, and prints what carries the gradient. It needs only the files of the run's folder.
"""

import argparse
import sys
from collections.abc import Sequence

from nemo_rl_lite.errors import UsageError, shown_as_message
from nemo_rl_lite.system.machine import local_path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 done, 1 the page cannot be written, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite why", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=local_path, help="a run's folder or name, or last")
    parser.add_argument("--step", metavar="K", type=int, required=True)
    shown = "number of a sample in the step, whose tokens the page shows (default: those with the largest gradient)"
    parser.add_argument("--sample", metavar="S", type=int, nargs="+", default=[], help=shown)
    where = "the file to write (default: why-step-K.html in the run's folder)"
    parser.add_argument("--output", metavar="FILE", type=local_path, help=where)
    given = parser.parse_args(arguments)
    with shown_as_message("nrl-lite why"):
        import torch

        from nemo_rl_lite.losses.interface import make_loss
        from nemo_rl_lite.observability.console import RunConsole
        from nemo_rl_lite.observability.environment import CONFIG_FILE
        from nemo_rl_lite.observability.runs import find_run
        from nemo_rl_lite.observability.trackers import METRICS_FILE
        from nemo_rl_lite.report.record import read_metrics
        from nemo_rl_lite.report.why import explain, read_trained
        from nemo_rl_lite.report.why_page import Account, show_why, write_why
        from nemo_rl_lite.validation.compose import restore

        # Micro-batches are too small for several threads.
        torch.set_num_threads(1)
        run = find_run(str(given.run))
        config = restore((run / CONFIG_FILE).read_text())
        trained = read_trained(run, given.step, config)
        count = len(trained.samples["sample"])
        if wrong := [one for one in given.sample if not 0 <= one < count]:
            raise UsageError(f"nrl-lite why: --sample {wrong[0]}: step {given.step} has samples 0 to {count - 1}")
        metrics = read_metrics(run / METRICS_FILE, [])
        logged = [one["train/loss"] for one in metrics if one["step"] == given.step and "train/loss" in one]
        account = Account(trained, explain(trained, make_loss(config.algorithm)), logged[-1] if logged else None)
        output = given.output or run / f"why-step-{given.step}.html"
        piece = write_why(run, given.step, account, config, given.sample, output)
        show_why(account, piece, RunConsole())
    sys.stdout.write(f"{output}\n")


if __name__ == "__main__":
    main()
