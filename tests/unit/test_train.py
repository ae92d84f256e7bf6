"""Sweeps, in a process of their own each: Hydra changes the process's logging. A stand-in is the run."""

import os
import subprocess
import sys

import pytest

# What each job does, by its seed, in place of a run.
SCRIPT = """
import sys, types
from nemo_rl_lite import train
from nemo_rl_lite.system import stopping
from nemo_rl_lite.errors import LauncherError, RefitError, RunStopped, WorkerError
from nemo_rl_lite.observability.summary import Summary

def run(config, folder, command, callbacks):
    match config.algorithm.seed:
        case 3: raise WorkerError("policy-0", "train", "no reason")
        case 4: raise RefitError("bucket 7")
        case 5: raise ValueError("a defect")
        case 6:
            stopping.note_signal(15)
            raise LauncherError("a signal came, and the checkpoint cannot be written")
        case 75: raise RunStopped(3, 9, "SIGTERM was received", str(folder))
    print("done", config.algorithm.seed)
    return Summary(str(folder), 1, None, None, None, None, 1.0, {}, {})

sys.modules["nemo_rl_lite.run.run"] = types.SimpleNamespace(run=run)
train.main(sys.argv[1:])
"""


def launch(folder, *arguments):
    """Exit status, seeds of the jobs that were done, standard error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    seeds = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("done ")]
    return done.returncode, seeds, done.stderr


def test_a_sweep_goes_on_where_a_job_fails(tmp_path):
    status, seeds, error = launch(tmp_path, "-m", "algorithm.seed=1,4,5,3,2")
    assert (status, seeds) == (4, [1, 2])
    assert error.splitlines()[-1] == "3 of 5 jobs of the sweep failed: #1, #2, #3"
    assert error.index("bucket 7") < error.index("ValueError: a defect") < error.index("worker error: policy-0")


@pytest.mark.parametrize(("seed", "status"), [(75, 75), (6, 1)])
def test_a_sweep_that_is_ended_does_not_go_on(tmp_path, seed, status):
    assert launch(tmp_path, "--multirun", f"algorithm.seed=1,{seed},2")[:2] == (status, [1])
