"""Copies that were watched do what the loader did, for loaders like those of inference engines."""

import pytest
import torch

from nemo_rl_lite.refit.buckets import Stream
from nemo_rl_lite.refit.engine import CopyReplayLoader
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.refit.layout import ReceivedBucket, buffer_of, dtype_name, make_plan, new_buffers

HIDDEN, HEADS, VOCABULARY = 6, 4, 10


class Engine:
    """One of two tensor-parallel ranks: fused queries, keys and values, a padded vocabulary, experts, a cast."""

    def __init__(self, rank: int = 0):
        self.rank, self.calls = rank, []
        self.parameters = {
            "qkv": torch.nn.Parameter(torch.zeros(3 * HEADS // 2, HIDDEN)),
            "embedding": torch.nn.Parameter(torch.zeros(8, HIDDEN)),
            "experts": torch.nn.Parameter(torch.zeros(2, HIDDEN, 3)),
            "norm": torch.nn.Parameter(torch.zeros(HIDDEN)),
            "scale": torch.nn.Parameter(torch.zeros(())),
            "cast": torch.nn.Parameter(torch.zeros(5)),
        }

    def load(self, named) -> set[str]:
        filled = set()
        self.calls.append([name for name, _ in named])
        for name, tensor in named:
            getattr(self, f"load_{name.split('.')[0]}")(name, tensor)
            filled.add(name.split(".")[0] if name[0] not in "qkv" else "qkv")
        return filled - {"unused"}

    def load_q(self, name, tensor, place=0):
        half = HEADS // 2
        own = self.parameters["qkv"].data.narrow(0, place * half, half)
        own.copy_(tensor.narrow(0, self.rank * half, half))

    def load_k(self, name, tensor):
        self.load_q(name, tensor, 1)

    def load_v(self, name, tensor):
        self.load_q(name, tensor, 2)

    def load_embedding(self, name, tensor):
        mine = tensor.chunk(2)[self.rank]
        self.parameters["embedding"][: len(mine)].data.copy_(mine)
        self.parameters["embedding"][len(mine) :].data.fill_(0)

    def load_experts(self, name, tensor):
        # Held the other way round.
        self.parameters["experts"].data[int(name.split(".")[1])].copy_(tensor.t())

    def load_norm(self, name, tensor):
        with torch.no_grad():
            self.parameters["norm"].copy_(tensor)

    def load_scale(self, name, tensor):
        self.parameters["scale"].data.fill_(tensor.item())

    def load_cast(self, name, tensor):
        self.parameters["cast"].data.copy_(tensor.float() * 2)

    def load_unused(self, name, tensor):
        pass


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "q": torch.randn(HEADS, HIDDEN),
        "k": torch.randn(HEADS, HIDDEN),
        "v": torch.randn(HEADS, HIDDEN),
        "embedding": torch.randn(VOCABULARY, HIDDEN),
        "experts.0": torch.randn(3, HIDDEN),
        "experts.1": torch.randn(3, HIDDEN),
        "norm": torch.randn(HIDDEN).bfloat16(),
        "scale": torch.randn(()),
        "cast": torch.randn(5).half(),
        "unused": torch.randn(2),
    }


def refit(destinations: CopyReplayLoader, values: dict[str, torch.Tensor], bucket_bytes: int, buffers: int = 2) -> None:
    plan = make_plan([(name, tuple(one.shape), dtype_name(one.dtype)) for name, one in values.items()], bucket_bytes)
    room, export = new_buffers(plan, buffers, torch.device("cpu")), Stream(plan, values.items)
    export.start()
    for index, bucket in enumerate(plan.buckets):
        buffer = buffer_of(plan, room, index)
        export.begin(index, RefitReport())
        export.fill(index, buffer, RefitReport())
        destinations.fill(ReceivedBucket(index, bucket, buffer))
        # The buffer is filled again soon: nothing may point there.
        buffer.fill_(255)


@pytest.mark.parametrize("bucket_bytes", [1, 1024, 10**6])
@pytest.mark.parametrize("rank", [0, 1])
def test_later_refits_give_what_the_loader_gives(rank, bucket_bytes):
    engine, expected = Engine(rank), Engine(rank)
    destinations = CopyReplayLoader(engine.load, engine.parameters.values())
    for seed in range(3):
        refit(destinations, weights(seed), bucket_bytes)
        expected.load(list(weights(seed).items()))
        for name, parameter in expected.parameters.items():
            assert torch.equal(engine.parameters[name], parameter), (seed, name)
    assert destinations.filled == set(engine.parameters)


def test_only_what_the_loader_computes_with_is_left_to_it():
    engine = Engine()
    destinations = CopyReplayLoader(engine.load, engine.parameters.values())
    refit(destinations, weights(0), 10**6)
    assert engine.calls == [list(weights(0))]
    refit(destinations, weights(1), 10**6)
    assert engine.calls[1:] == [["scale", "cast"]]
    assert destinations.left == {"scale", "cast"}


def test_buffers_in_another_place_do_as_well():
    """A new connection has other memory."""
    engine, expected = Engine(), Engine()
    destinations = CopyReplayLoader(engine.load, engine.parameters.values())
    refit(destinations, weights(0), 1024, buffers=1)
    refit(destinations, weights(1), 1024, buffers=3)
    expected.load(list(weights(1).items()))
    assert all(torch.equal(engine.parameters[name], value) for name, value in expected.parameters.items())


class InPlace(Engine):
    """Changes what came, before it copies that."""

    def load_norm(self, name, tensor):
        self.parameters["norm"].data.copy_(tensor.add_(1))


class Afterwards(Engine):
    """Out of sight: not computed with what came."""

    def load_norm(self, name, tensor):
        super().load_norm(name, tensor)
        self.parameters["norm"].data.mul_(3)


class ThroughATemporary(Engine):
    def load_norm(self, name, tensor):
        between = torch.empty(HIDDEN)
        between.copy_(tensor)
        self.parameters["norm"].data.copy_(between)


class Derived(Engine):
    """A parameter from another, once that has come."""

    def __init__(self, rank: int = 0):
        super().__init__(rank)
        self.parameters["twice"] = torch.nn.Parameter(torch.zeros(HIDDEN))

    def load(self, named):
        filled = super().load(named)
        if "norm" in filled:
            self.parameters["twice"].data.copy_(self.parameters["norm"].data * 2)
        return filled


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
@pytest.mark.parametrize("kind", [InPlace, Afterwards, ThroughATemporary, Derived])
def test_a_loader_that_does_more_than_copy_is_called_each_time(kind, bucket_bytes):
    engine, expected = kind(), kind()
    destinations = CopyReplayLoader(engine.load, engine.parameters.values())
    for seed in range(3):
        refit(destinations, weights(seed), bucket_bytes)
        expected.load(list(weights(seed).items()))
        assert all(torch.equal(engine.parameters[name], value) for name, value in expected.parameters.items()), seed
    assert "norm" in destinations.left
    if bucket_bytes == 1:
        assert destinations.left == {"norm", "scale", "cast"}


def test_numbers_that_are_none_are_copied_as_well():
    engine = Engine()
    destinations = CopyReplayLoader(engine.load, engine.parameters.values())
    refit(destinations, weights(0) | {"norm": torch.full((HIDDEN,), float("nan")).bfloat16()}, 1)
    assert "norm" not in destinations.left
