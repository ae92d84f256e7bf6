"""Pieces of a refit that are other code on a GPU."""

import numpy as np
import pytest
import torch

from nemo_rl_lite.refit.copy_table import CopyTable
from nemo_rl_lite.refit.interface import Checksums, RefitReport
from nemo_rl_lite.refit.layout import ReceivedBucket, same_bytes
from nemo_rl_lite.refit.trace import StridedView
from nemo_rl_lite.refit.windows import PieceExport, _PieceLoader
from tests.unit.refit.test_windows import Engine, Model, Policy, exchange

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


def test_one_table_copies_and_compares_windows_of_all_kinds():
    torch.manual_seed(0)
    source = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device="cuda")
    copies, expected = [], []
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        words = source.view(dtype)
        for begin in (0, 1, 5, 8):
            for sizes, strides in (
                ((1_234_567,), (1,)),
                ((333, 2048), (2056, 1)),
                ((1000, 7), (11, 1)),
                ((128, 96, 100), (40_000, 128, 1)),
                ((300, 400), (1, 300)),
            ):
                window = StridedView(begin, sizes, strides)
                copies.append((0, window, torch.zeros(sizes, dtype=dtype, device="cuda")))
                expected.append(window.of(words))
    table, bases = CopyTable(copies), np.array([source.data_ptr()])
    assert table.first_differing(bases) == 0
    table.run(bases)
    targets = [target for _, _, target in copies]
    assert all(same_bytes(target, one) for target, one in zip(targets, expected, strict=True))
    assert table.first_differing(bases) is None
    for number in range(len(targets) - 1, -1, -7):
        targets[number].view(-1).view(torch.uint8)[-1] ^= 1
        assert table.first_differing(bases) == number


def test_a_hundred_thousand_copies_from_moved_memory():
    count, size = 100_000, 130
    sources = torch.randint(-100, 100, (2, count * size), dtype=torch.int16, device="cuda")
    target = torch.zeros(count, size, dtype=torch.int16, device="cuda")
    windows = [StridedView(row * size, (size,), (1,)) for row in range(count)]
    # In reverse order, so that no copies are neighbours on both sides.
    table = CopyTable([(0, window, row) for window, row in zip(reversed(windows), target, strict=True)])
    for source in sources:
        bases = np.array([source.data_ptr()])
        table.run(bases)
        assert torch.equal(target, source.view(count, size).flip(0)) and table.first_differing(bases) is None
    target[77_777, 3] += 1
    assert table.first_differing(np.array([sources[1].data_ptr()])) == 77_777


def test_pieces_go_through_buckets_on_a_gpu():
    """Without a transport, which needs two GPUs."""
    model, device = Model(Policy()), torch.device("cuda")
    transfers = Engine().transfers(model, 2000)
    needed = [(piece, torch.zeros(piece.source.sizes, device=device)) for piece, _ in Engine().needs(model)[0]]
    parameters = {number: one.to(device) for number, one in model.parameters[0].items()}
    export, loader = PieceExport(transfers, parameters), _PieceLoader(transfers, needed)
    for _ in range(2):
        for index, one in enumerate(transfers):
            buffer = torch.zeros(one.bucket.nbytes, dtype=torch.uint8, device=device)
            export.fill(index, buffer, RefitReport())
            loader.fill(ReceivedBucket(index, one.bucket, buffer))
        for piece, target in needed:
            assert torch.equal(target, piece.source.of(parameters[piece.parameter]))
        for parameter in parameters.values():
            parameter.add_(1)


# Layouts with a GPU for each rank. With two GPUs, policy ranks share one: NCCL refuses that only within a group.
TWO = [(Policy(), Engine(), [0, 1]), (Policy(tp=2), Engine(), [0, 0, 1]), (Policy(pp=2), Engine(), [0, 0, 1])]
FOUR = [
    (Policy(tp=2), Engine(tp=2)),
    (Policy(pp=2), Engine(tp=2)),
    (Policy(dp=2), Engine(engines=2)),
    (Policy(ep=2), Engine(tp=2, by_expert=True)),
    (Policy(), Engine(tp=2)),
]


@pytest.mark.parametrize(
    ("policy", "engine", "gpus"),
    [pytest.param(*one, marks=pytest.mark.gpu(2)) for one in TWO]
    + [pytest.param(*one, range(4), marks=pytest.mark.gpu(4)) for one in FOUR],
    ids=str,
)
def test_windows_arrive_over_nccl(policy, engine, gpus):
    exchange(Model(policy), engine, [torch.device("cuda", gpu) for gpu in gpus])
