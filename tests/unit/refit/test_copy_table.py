"""Tables of copies, and their kernel in Triton's interpreter."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from nemo_rl_lite.refit.copy_table import CopyTable
from nemo_rl_lite.refit.trace import StridedView

# Sizes, strides and first element of windows, and whether their targets are transposed.
WINDOWS = {
    "whole": ((6, 40), (40, 1), 0, False),
    "odd first element": ((5, 7), (7, 1), 3, False),
    "columns": ((6, 13), (40, 1), 5, False),
    "experts with an outer stride": ((3, 2, 16), (80, 20, 1), 0, False),
    "four axes": ((2, 3, 2, 5), (120, 40, 11, 1), 1, False),
    "transposed": ((5, 7), (7, 1), 0, True),
    "one element": ((), (), 9, False),
    "nothing": ((0, 4), (4, 1), 0, False),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_table_copies_what_torch_copies(window, dtype):
    sizes, strides, begin, transposed = WINDOWS[window]
    source = torch.randint(-100, 100, (240,)).to(dtype)
    target = torch.zeros(sizes[::-1], dtype=dtype).T if transposed else torch.zeros(sizes, dtype=dtype)
    expected = source.as_strided(sizes, strides, begin)
    table, bases = CopyTable([(1, StridedView(begin, sizes, strides), target)]), np.array([0, source.data_ptr()])
    table.run(bases)
    assert torch.equal(target, expected)
    assert table.first_differing(bases) is None
    if target.numel():
        target[(-1,) * target.dim()] += 2
        assert table.first_differing(bases) == 0


def test_sources_may_move_and_the_first_difference_is_named():
    first, second = torch.arange(8.0), torch.arange(8.0) + 100
    begins, targets = (0, 2, 4), [torch.zeros(4) for _ in range(3)]
    windows = [StridedView(begin, (4,), (1,)) for begin in begins]
    table = CopyTable([(0, window, target) for window, target in zip(windows, targets, strict=True)])
    for source in (first, second):
        bases = np.array([source.data_ptr()])
        table.run(bases)
        assert torch.equal(torch.stack(targets), torch.stack([source[begin:][:4] for begin in begins]))
    targets[1][3] = targets[2][0] = -1
    assert table.first_differing(bases) == 1


def test_the_kernel_copies_and_compares_as_the_table_does():
    # Triton's interpreter runs kernels on a CPU; it must be asked for before Triton is imported.
    program = """
import numpy as np
import torch
from nemo_rl_lite.refit import copy_kernel
from nemo_rl_lite.refit.copy_table import CopyTable
from nemo_rl_lite.refit.trace import StridedView

copy_kernel.BLOCK = 64
torch.manual_seed(0)
shapes = [((300,), (1,)), ((64,), (1,)), ((7, 33), (40, 1)), ((3, 5, 8), (160, 24, 1)), ((9, 6), (1, 9)), ((), ())]
for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
    for begin in (0, 1, 8):
        source = torch.randint(-100, 100, (600,)).to(dtype)
        targets = [torch.zeros(sizes, dtype=dtype) for sizes, _ in shapes]
        table = CopyTable([(0, StridedView(begin, *shape), to) for shape, to in zip(shapes, targets)])
        bases = np.array([source.data_ptr()])

        def differing():
            first = torch.full((), len(shapes))
            for word, *given in table.tables(bases):
                copy_kernel.compare(word, *map(torch.from_numpy, given), first)
            return int(first)

        assert differing() == 0
        for word, *given in table.tables(bases):
            copy_kernel.copy(word, *map(torch.from_numpy, given))
        for (sizes, strides), target in zip(shapes, targets):
            assert torch.equal(target, source.as_strided(sizes, strides, begin)), (sizes, dtype, begin)
        assert differing() == len(shapes)
        for number in (4, 3, 2, 0):
            targets[number].view(-1)[-1] ^= 1
            assert differing() == number, (number, dtype, begin)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
