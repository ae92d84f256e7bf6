"""Pieces of a refit that are other code on a GPU."""

import pytest
import torch

from nemo_rl_lite.refit.interface import Checksums

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_checksums_on_a_gpu_are_those_of_a_cpu(verify):
    on_cpu, on_gpu = Checksums(verify), Checksums(verify)
    for size in (8, 512, 8 << 20, (40 << 20) + 512):
        buffer = torch.randint(0, 256, (size,), dtype=torch.uint8)
        on_cpu.add(buffer)
        on_gpu.add(buffer.cuda())
    assert on_gpu.values() == on_cpu.values() and all(on_cpu.values())


def test_one_changed_bit_changes_the_sum_wherever_it_is():
    buffer = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8, device="cuda")
    sums = Checksums("full")
    sums.add(buffer)
    for place in (0, 7, 12345, (8 << 20) - 1):
        buffer[place] ^= 1
        sums.add(buffer)
        buffer[place] ^= 1
    assert len(set(sums.values())) == 5


def test_complemented_words_change_the_sum():
    words = torch.randint(-(2**62), 2**62, (4096,), device="cuda")
    sums = Checksums("full")
    sums.add(words.view(torch.uint8))
    for place in range(64):
        changed = words.clone()
        changed[place :: place + 1].bitwise_not_()
        sums.add(changed.view(torch.uint8))
    first, *others = sums.values()
    assert first not in others
