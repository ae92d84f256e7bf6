"""Triton's kernels for slices of logits give what torch gives, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_kernels_give_what_torch_gives(tmp_path):
    # Triton's interpreter runs kernels on a CPU; it must be asked for before Triton is imported.
    program = """
import sys
from pathlib import Path
from tests.linear_scores_cases import alone, check_everything
from nemo_rl_lite.policy import vocab_chunks_kernel

alone(Path(sys.argv[1]))
check_everything(vocab_chunks_kernel, "cpu")
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
