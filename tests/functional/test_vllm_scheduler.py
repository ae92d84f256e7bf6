"""The short way through vLLM's scheduler leaves nothing out."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.functional


def test_steps_and_answers_are_those_of_vllms_own_scheduler(model_folder, engine_environment):
    script = Path(__file__).with_name("vllm_schedulers.py")
    command = [sys.executable, str(script), str(model_folder)]
    done = subprocess.run(command, env=engine_environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
