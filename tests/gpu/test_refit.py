"""Pieces of a refit that are other code on a GPU."""

import pytest
import torch

from nemo_rl_lite.refit.interface import Checksums, RefitReport
from nemo_rl_lite.refit.layout import ReceivedBucket
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
