"""Run trials of scripts/bench in one process: bench_trials.py FOLDER SCRIPT...

FOLDER/SCRIPT.error says why a trial failed; it is empty for one that did not. Ranks are forked from this process, which
was forked from one that has imported what they need.
"""

import functools
import importlib
import multiprocessing
import sys
import traceback
from pathlib import Path

from tests.functional.here import run_here

# Their ranks are forked before anything else has run here.
FIRST = ("checkpoint_io", "export_memory", "longest_context", "refit", "shared_prompts")
# Starts Ray, whose threads a later fork would not have.
LAST = ("plane",)


def tiny_run_here(whole_runs) -> Path:
    """What `tiny_run` returns, of a run in this process."""
    folder = whole_runs._temporary() / "run"
    done = run_here(folder, whole_runs.tiny_model(), *whole_runs.TINY)
    assert done.returncode == 0, done.stderr
    return folder


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    sys.argv = ["--trial"]
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
    whole_runs = importlib.import_module("whole_runs")
    whole_runs.processes = lambda on_gpus: multiprocessing.get_context("fork")
    whole_runs.tiny_run = functools.cache(functools.partial(tiny_run_here, whole_runs))
    for name in sorted(names, key=lambda name: (name not in FIRST, name in LAST)):
        error = ""
        try:
            importlib.import_module(name).trial()
        except (Exception, SystemExit):
            error = traceback.format_exc()
        (Path(folder) / f"{name}.error").write_text(error)
