"""Runs as jobs of a real Slurm: several nodes, stopped before the end, queued again, gone on with.

Skipped where Slurm is not installed; on Debian and Ubuntu: apt-get install slurmctld slurmd slurm-client munge
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.functional.conftest import PYTHONPATH
from tests.functional.embedded import OF_THE_EMBEDDED
from tests.functional.slurm_site import Site, has_cgroups, missing
from tests.functional.supervised import SFT, write_data

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.functional,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm here: {', '.join(missing())} not found"),
]
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
STEPS = 14
TRAINING = [
    *SFT,
    "policy.train_micro_batch_size=4",
    f"algorithm.max_num_steps={STEPS}",
    "algorithm.max_num_epochs=9",
    "algorithm.val_period=0",
    "checkpoint.save_period=100",
    "checkpoint.export_hf_at_end=false",
    "logger.plots=false",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    # Not in a test's own folder: the path of a socket may have 107 bytes.
    site = Site(tmp_path_factory.mktemp("slurm"))
    try:
        site.start()
        yield site
    finally:
        site.stop()


class Job:
    """One that was submitted by `nrl-lite slurm`."""

    def __init__(self, site: Site, folder: Path, model: Path, *words: str):
        self.site, self.run, self._log = site, folder / "run", folder / "job.out"
        overrides = [
            f"hydra.run.dir={self.run}",
            f"policy.model_name={model}",
            *OF_THE_EMBEDDED,
            *TRAINING,
            *write_data(folder),
        ]
        command = [sys.executable, "-m", "nemo_rl_lite.cli", "slurm", "--submit", f"--log={self._log}", *words]
        environ = site.environment | {"PYTHONPATH": PYTHONPATH}
        done = subprocess.run(
            [*command, *overrides], env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def until(self, pattern: str, limit_s: float = 300) -> None:
        deadline = time.monotonic() + limit_s
        while not re.search(pattern, self.log, re.M):
            state = self.site.state(self.id)
            assert state in UNFINISHED and time.monotonic() < deadline, f"{state}: {self.log[-3000:]}"
            time.sleep(0.5)

    def ends(self, limit_s: float = 300) -> str:
        deadline = time.monotonic() + limit_s
        while (state := self.site.state(self.id)) in UNFINISHED:
            assert time.monotonic() < deadline, f"{state}: {self.log[-3000:]}"
            time.sleep(0.5)
        return state

    def starts_again_now(self) -> None:
        """Slurm lets a job that is queued again wait for two minutes. Not at once: a node takes what begins in the
        second of the job's end for the job that ended."""
        self.site.rest()
        self.site.ask("scontrol", "update", f"JobId={self.id}", "StartTime=now+5")

    def steps(self) -> list[int]:
        """Those whose loss is in the metrics, in order."""
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [line["step"] for line in lines if "train/loss" in line]


def processes_of(run: Path) -> list[str]:
    """What still runs of a run: command lines with its folder, and Ray's."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(run) in line or "nrl-ray-" in line]


def test_a_run_on_two_nodes_is_stopped_in_time_queued_again_and_ends(site, tmp_path, model_folder):
    two_nodes = ["cluster.num_nodes=2", "cluster.cpu_ranks=2"]
    job = Job(site, tmp_path, model_folder, "-c", "2", "--mem", "4000M", *two_nodes)
    job.until(r"^step +3/")
    # What Slurm does at --signal, before the time limit.
    site.ask("scancel", "--batch", "--signal=USR1", job.id)
    job.until("stopped with a checkpoint; requeued")
    job.starts_again_now()
    job.until("^resuming after step")
    assert job.ends() == "COMPLETED"
    assert job.log.count("Ray is up on 2 nodes") == 2
    assert job.steps() == list(range(1, STEPS + 1))
    assert {path.name for path in (job.run / "logs").iterdir()} >= {"ray-node-0.log", "ray-node-1.log", "policy-1.log"}
    assert not processes_of(job.run)


@pytest.mark.skipif(not has_cgroups(), reason="without cgroups Slurm sends SIGTERM to Ray's processes, too")
def test_a_run_that_gives_way_to_another_job_goes_on_after_it_and_stays_cancelled(site, tmp_path, model_folder):
    job = Job(site, tmp_path, model_folder, "--partition=low", "-c", "2", "--mem", "4000M")
    job.until(r"^step +3/")
    other = ["--partition=all", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    site.ask("sbatch", "--chdir=/", *other)
    job.until("SIGTERM: the run ends after this step")
    job.starts_again_now()
    job.until(f"^resuming after step (.|\\n)*^step +{STEPS - 2}/")
    site.ask("scancel", job.id)
    assert job.ends() == "CANCELLED"
    assert job.log.count("requeued") == 1
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= STEPS - 2
