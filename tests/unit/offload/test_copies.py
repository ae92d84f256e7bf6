"""A thread feeds copies to a device; on a CPU the thread makes them itself."""

import pytest
import torch

from nemo_rl_lite.offload import host_memory
from nemo_rl_lite.offload.host_memory import Copies, pieces


def test_pieces_cover_every_byte_once_and_in_order(monkeypatch):
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 10)
    sources = [torch.arange(n, dtype=torch.uint8) for n in (25, 0, 10, 1, 2, 3)]
    targets = [torch.zeros_like(source) for source in sources]
    cut = list(pieces(zip(targets, sources, strict=True)))
    assert [[len(source) for source in piece] for _, piece in cut] == [[10], [10], [5, 5], [5, 1, 2, 2], [1]]
    for into, of in cut:
        for target, source in zip(into, of, strict=True):
            target.copy_(source)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_copies_are_whole_when_the_wait_is_over():
    source = torch.arange(100_000_000, dtype=torch.int32).view(torch.uint8)
    target = torch.zeros_like(source)
    own = Copies([(target, source)], None)
    own.wait()
    assert own.done() and own.seconds() > 0 and torch.equal(target, source)


def test_what_stops_them_is_raised_by_the_wait():
    own = Copies([(torch.zeros(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8))], None)
    with pytest.raises(ValueError, match="5 bytes to 3"):
        own.wait()
