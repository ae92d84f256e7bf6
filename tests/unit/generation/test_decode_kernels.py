"""The kernels of a decoding step under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_the_kernels_give_what_torch_gives():
    # It must be asked for before Triton is imported.
    program = """
import torch
from tests.decode_kernel_cases import SMALL, check_attention, check_distribution, check_samples

torch.manual_seed(1)
for heads_first in (False, True):
    for batch in SMALL:
        check_attention(batch, "cpu", torch.float32, heads_first)
for vocabulary in (50, 200):
    check_samples(vocabulary, "cpu", torch.float32, 64)
check_distribution(800, "cpu", 16)
"""
    root, environment = Path(__file__).parents[3], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
