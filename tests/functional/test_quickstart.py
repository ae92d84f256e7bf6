"""The main job, whole, as a newcomer runs it (after installation)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.functional


def test_quickstart_learns(tmp_path):
    command = [sys.executable, "-m", "nemo_rl_lite.quickstart", "cluster.threads_per_worker=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    pattern = r"RESULT accuracy_before=([\d.]+) accuracy_after=([\d.]+) seconds=([\d.]+) steps=(\d+) run=(\S+)"
    before, after, _, steps, run = re.fullmatch(pattern, last).groups()
    assert float(after) - float(before) >= 0.3
    assert int(steps) == done.stdout.count("\nstep ") == 30
    assert (Path(run) / "plots" / "run.png").exists()
    assert "Traceback" not in done.stdout + done.stderr
