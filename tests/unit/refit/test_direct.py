"""Weights out of a producer's parameters, one process a rank, with files for the memory of a device."""

import pytest
import torch

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit import direct
from nemo_rl_lite.refit.boxes import Box, Piece
from nemo_rl_lite.refit.destinations import Destinations
from nemo_rl_lite.refit.direct import DirectReceiver, DirectSender
from nemo_rl_lite.refit.lending import Lending
from nemo_rl_lite.refit.packing import same_bytes
from nemo_rl_lite.refit.plan import make_plan
from tests.unit.refit.files import Files
from tests.unit.refit.ranks import CPU, SHORT, run

HIDDEN, GROUPS = 6, 2
# Of each group two rows of queries, one of keys and one of values.
FUSED = (GROUPS, 4, HIDDEN)
PLAN_SHAPES = {
    "q": ((GROUPS * 2, HIDDEN), "float32"),
    "k": ((GROUPS, HIDDEN), "float32"),
    "norm": ((HIDDEN,), "bfloat16"),
    "tied": ((GROUPS, HIDDEN), "float32"),
}


def rows(part: int, group: int, begin: int, count: int, to: int) -> Box:
    """Rows of one group of the fused parameter, to a row of the tensor."""
    piece = Piece(0, part, (group * 4 + begin) * HIDDEN, (count * HIDDEN,), (1,))
    return Box(piece, to * HIDDEN, (1,))


RECIPE = {
    "q": [rows(3, group, 0, 2, group * 2) for group in range(GROUPS)],
    "k": [Box(Piece(0, 3, 2 * HIDDEN, (GROUPS, HIDDEN), (4 * HIDDEN, 1)), 0, (HIDDEN, 1))],
    "norm": [Box(Piece(0, 7, 0, (HIDDEN,), (1,)), 0, (1,))],
    "tied": [Box(Piece(0, 3, 2 * HIDDEN, (GROUPS, HIDDEN), (4 * HIDDEN, 1)), 0, (HIDDEN, 1))],
}


def plan(bucket_bytes: int = 600):
    return make_plan([(name, shape, dtype) for name, (shape, dtype) in PLAN_SHAPES.items()], bucket_bytes)


def parameters(files: Files, seed: int) -> dict[int, torch.Tensor]:
    """In other files at each refit, as after a move."""
    torch.manual_seed(seed)
    fused = files.new(f"fused {seed}", torch.randn(FUSED), offset=512)
    return {3: fused, 7: files.new(f"norm {seed}", torch.randn(HIDDEN).bfloat16())}


def expected(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    fused, norm = torch.randn(FUSED), torch.randn(HIDDEN).bfloat16()
    keys = fused[:, 2]
    return {"q": fused[:, :2].reshape(-1, HIDDEN), "k": keys, "norm": norm, "tied": keys}


def lend(folder, refits: int):
    """A producer's process: so many refits, with new values in new memory each time."""

    def producer(group):
        files = Files(folder)
        lent = [Lending(parameters(files, seed), 0, [0], None, files) for seed in range(refits)]
        return [DirectSender(plan(), group, one).lend().seconds for one in lent]

    return producer


class Engine:
    """Fused queries and keys, and what else its loader does."""

    def __init__(self, load_more=None):
        self.calls, self._more = 0, load_more
        self.memory = {
            "qk": torch.zeros(GROUPS * 3, HIDDEN),
            "norm": torch.zeros(HIDDEN, dtype=torch.bfloat16),
            "tied": torch.zeros(GROUPS, HIDDEN),
            "turned": torch.zeros(HIDDEN, GROUPS),
        }

    def load(self, named):
        self.calls += 1
        for name, tensor in named:
            if self._more is not None and self._more(self, name, tensor):
                continue
            if name in ("q", "k"):
                begin = 0 if name == "q" else GROUPS * 2
                self.memory["qk"][begin : begin + len(tensor)].copy_(tensor)
            else:
                self.memory[name].copy_(tensor)
        return set(self.memory)

    def seen(self):
        own = {name: tensor.clone() for name, tensor in self.memory.items()}
        return own | {"q": own["qk"][: GROUPS * 2], "k": own["qk"][GROUPS * 2 :]}


def fill(folder, refits: int, load_more=None, bucket_bytes=600):
    """A consumer's process; what the engine has after each refit and how often it was asked to load, and the files."""

    def consumer(group):
        files, engine, seen = Files(folder), Engine(load_more), []
        destinations = Destinations(engine.load, engine.memory.values())
        receiver = DirectReceiver(plan(bucket_bytes), group, RECIPE, CPU, "full", files)
        for _ in range(refits):
            receiver.fill(destinations)
            assert not files.now_open
            seen.append((engine.seen(), engine.calls))
        return seen, files.opened_in_all

    return consumer


@pytest.mark.parametrize("consumers", [1, 2])
def test_after_the_first_refit_weights_go_straight_to_their_places(tmp_path, consumers):
    times, *engines = run([lend(tmp_path, 3)] + [fill(tmp_path, 3)] * consumers)
    buckets = len(plan().buckets)
    assert buckets == 2
    for seen, opened in engines:
        for seed, (weights, calls) in enumerate(seen):
            assert calls == buckets
            for name, tensor in expected(seed).items():
                assert same_bytes(weights[name], tensor), (seed, name)
        assert opened == 3 * 2
    assert all(set(seconds) == {"pack", "transfer"} for seconds in times)


def turns(engine, name, tensor):
    """To memory that is not contiguous."""
    if name == "tied":
        engine.memory["turned"].T.copy_(tensor)
    return name == "tied"


def takes_apart(engine, name, tensor):
    """The second row stays as it was, and the first one's halves change places."""
    if name == "tied":
        engine.memory["tied"][0, :3].copy_(tensor[0, 3:])
        engine.memory["tied"][0, 3:].copy_(tensor[0, :3])
    return name == "tied"


def test_a_loader_that_takes_parts_gets_no_more_than_them(tmp_path):
    _, (seen, _) = run([lend(tmp_path, 3), fill(tmp_path, 3, takes_apart)])
    for seed, (weights, calls) in enumerate(seen):
        assert calls == len(plan().buckets)
        alone = Engine(takes_apart)
        alone.load(list(expected(seed).items()))
        for name, tensor in alone.seen().items():
            assert same_bytes(weights[name], tensor), (seed, name)


def computes(engine, name, tensor):
    if name == "norm":
        engine.memory["norm"].copy_(tensor * 2)
    return name == "norm"


def overwrites(engine, name, tensor):
    """The keys' place is given to the queries' first rows in the end."""
    if name == "tied":
        engine.memory["tied"].copy_(tensor)
        engine.memory["qk"][GROUPS * 2 :].copy_(tensor)
        engine.memory["qk"][:GROUPS].copy_(tensor)
    return name == "tied"


@pytest.mark.parametrize("load_more", [turns, computes, overwrites])
def test_a_loader_that_does_more_gets_each_bucket(tmp_path, load_more):
    _, (seen, _) = run([lend(tmp_path, 3), fill(tmp_path, 3, load_more)])
    for seed, (weights, _) in enumerate(seen):
        alone = Engine(load_more)
        alone.load(list(expected(seed).items()))
        for name, tensor in alone.seen().items():
            assert same_bytes(weights[name], tensor), (seed, name)


def test_without_an_engine_buckets_are_put_together(tmp_path):
    def consumer(group):
        files = Files(tmp_path)
        receiver = DirectReceiver(plan(), group, RECIPE, CPU, "full", files)
        return [
            {name: tensor.clone() for arrived in receiver for name, tensor in arrived.named()} for _ in range(2)
        ], receiver.report

    _, (seen, report) = run([lend(tmp_path, 2), consumer])
    for seed, weights in enumerate(seen):
        assert list(weights) == list(PLAN_SHAPES)
        assert all(same_bytes(weights[name], tensor) for name, tensor in expected(seed).items())
    assert set(report.seconds) == {"transfer"}


def test_another_plan_is_refused_before_any_memory_is_opened(tmp_path):
    _, refused = run([lend(tmp_path, 1), fill(tmp_path, 1, bucket_bytes=10**6)], SHORT)
    assert isinstance(refused, RefitError) and "another plan" in str(refused)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 4), (2, 50)])
def test_what_is_compared_slab_by_slab_is_all_of_it(shape, monkeypatch):
    monkeypatch.setattr(direct, "_COMPARED", 8)
    tensor = torch.rand(shape)
    assert torch.equal(torch.cat([slab.flatten() for slab in direct._slabs(tensor)]), tensor.flatten())


@pytest.mark.parametrize("verify", ["off", "sample", "full"])
def test_a_weight_that_was_not_copied_is_named(tmp_path, verify):
    def consumer(group):
        engine, files = Engine(), Files(tmp_path)
        destinations = Destinations(engine.load, engine.memory.values())
        receiver = DirectReceiver(plan(), group, RECIPE, CPU, verify, files)
        receiver.fill(destinations)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct.CopyList, "run", lambda self: None)
            try:
                receiver.fill(destinations)
            finally:
                assert not files.now_open
        return "not looked at"

    _, result = run([lend(tmp_path, 2), consumer], SHORT)
    if verify == "off":
        assert result == "not looked at"
    else:
        assert isinstance(result, RefitError) and "the engine's q is not the policy's" in str(result)


def test_a_consumer_that_dies_ends_the_producers_wait(tmp_path):
    def consumer(group):
        receiver = DirectReceiver(plan(), group, RECIPE, CPU, "full", Files(tmp_path / "nowhere"))
        raise_after = iter(receiver)
        next(raise_after)
        raise ValueError("died")

    error, died = run([lend(tmp_path, 1), consumer], SHORT)
    assert isinstance(died, ValueError)
    assert isinstance(error, RefitError) and "the end of the refit" in str(error)
