import os
import subprocess
import sys

import pytest
import torch

from nemo_rl_lite.refit import interface
from nemo_rl_lite.refit.interface import _EVERY, Checksums

_WORDS = 4096


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(interface, "_WORDS", _WORDS)


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def checksum(buffer: torch.Tensor) -> int:
    sums = Checksums("full")
    sums.add(buffer)
    (value,) = sums.values()
    return value


def test_equal_bytes_have_equal_checksums_and_any_changed_byte_shows():
    buffer = random_bytes(1024)
    reference = checksum(buffer)
    assert reference == checksum(buffer.clone())
    for index in range(0, 1024, 7):
        changed = buffer.clone()
        changed[index] ^= 1
        assert checksum(changed) != reference


def test_exchanged_words_show_also_across_chunks():
    buffer = random_bytes(8 * (_WORDS + 64))
    words = buffer.view(torch.int64)
    exchanged = words.clone()
    exchanged[3], exchanged[_WORDS + 5] = words[_WORDS + 5], words[3]
    assert checksum(exchanged.view(torch.uint8)) != checksum(buffer)


def test_exchanged_numbers_that_differ_in_their_sign_alone_show():
    values = torch.tensor([1.0, 2.0, 1.0, -2.0])
    exchanged = values[[2, 3, 0, 1]].clone()
    assert checksum(values.view(torch.uint8)) != checksum(exchanged.view(torch.uint8))


@pytest.mark.parametrize("kind", ["random", "zeros"])
@pytest.mark.parametrize(
    "change",
    [
        # A tensor of bfloat16 zeros that arrives as NaN is one such change.
        lambda words, at: words[at : at + 1].bitwise_not_(),
        lambda words, at: words[at : at + 1].bitwise_xor_(1 << int(at) % 63),
        lambda words, at: words[at : at + 1].bitwise_xor_(-(2**63)),
        lambda words, at: words[at:].copy_(words[at:].roll(1) ^ (words[at:] == words[at:].roll(1)).long()),
    ],
    ids=["complemented", "one bit", "sign", "shifted"],
)
def test_any_change_of_words_shows(kind, change):
    words = random_bytes(8 * 4096).view(torch.int64) if kind == "random" else torch.zeros(4096, dtype=torch.int64)
    reference = checksum(words.view(torch.uint8))
    for at in torch.randperm(4095, generator=torch.Generator().manual_seed(1))[:500]:
        changed = words.clone()
        change(changed, at)
        assert not torch.equal(changed, words) and checksum(changed.view(torch.uint8)) != reference


def test_the_empty_buffer_and_zeros():
    assert checksum(torch.zeros(0, dtype=torch.uint8)) == checksum(torch.zeros(512, dtype=torch.uint8)) == 0


def test_all_buffers_at_once_give_what_each_gives_also_when_they_are_filled_again():
    buffers, sums = [random_bytes(size) for size in (512, 1024)], Checksums("full")
    expected = [checksum(buffer) for buffer in buffers]
    for buffer in buffers:
        sums.add(buffer)
        buffer.zero_()
    assert sums.values() == expected


def test_a_sample_sees_its_chunks_and_no_others():
    buffer = random_bytes(8 * _WORDS * (_EVERY["sample"] + 1))
    for index, seen in ((0, True), (8 * _WORDS, False), (8 * _WORDS * _EVERY["sample"], True)):
        sums = Checksums("sample")
        sums.add(buffer)
        buffer[index] ^= 1
        sums.add(buffer)
        before, after = sums.values()
        assert (before != after) == seen


def test_the_gpu_kernel_gives_the_same_numbers():
    # Triton's interpreter runs kernels on a CPU; it must be asked for before Triton is imported.
    program = """
import torch
from nemo_rl_lite.refit import interface
from nemo_rl_lite.refit.checksum_kernel import sum_words

interface._WORDS = 8192
for words in (1, 4096, 8192, 8193, 50001):
    buffer = torch.randint(0, 256, (words * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(words))
    buffer[:8] = 255
    for every in (1, 2, 16):
        given = sum_words(buffer.view(torch.int64), every, interface._WORDS, interface._ODD)
        assert int(given) == int(interface._sum(buffer, every)) != 0, (words, every)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
