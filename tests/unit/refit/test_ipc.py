"""Weights copied out of a producer's parameters, one process a rank, with files for the memory of a device."""

import pytest
import torch
from torch import Tensor, nn

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit import ipc
from nemo_rl_lite.refit.engine import CopyReplayLoader
from nemo_rl_lite.refit.ipc import DirectReceiver, DirectSender, IpcExport, SharedFrozenParams, share_weights
from nemo_rl_lite.refit.layout import make_plan, same_bytes
from nemo_rl_lite.refit.trace import Segment, StridedView
from tests.unit.refit.files import Files
from tests.unit.refit.ranks import CPU, SHORT, run
from tests.unit.refit.test_buckets import Collected, consume

HIDDEN, GROUPS = 6, 2
# Of each group two rows of queries, one of keys and one of values.
FUSED = (GROUPS, 4, HIDDEN)
PLAN_SHAPES = {
    "q": ((GROUPS * 2, HIDDEN), "float32"),
    "k": ((GROUPS, HIDDEN), "float32"),
    "norm": ((HIDDEN,), "bfloat16"),
    "tied": ((GROUPS, HIDDEN), "float32"),
}


def rows(group: int, to: int) -> Segment:
    """Two rows of one group of the fused parameter, to a row of the tensor."""
    size = (2 * HIDDEN,)
    return Segment(0, 3, StridedView(group * 4 * HIDDEN, size, (1,)), StridedView(to * HIDDEN, size, (1,)))


SIZES = (GROUPS, HIDDEN)
KEYS = [Segment(0, 3, StridedView(2 * HIDDEN, SIZES, (4 * HIDDEN, 1)), StridedView(0, SIZES, (HIDDEN, 1)))]
RECIPE = {
    "q": [rows(group, group * 2) for group in range(GROUPS)],
    "k": KEYS,
    "norm": [Segment(0, 7, StridedView(0, (HIDDEN,), (1,)), StridedView(0, (HIDDEN,), (1,)))],
    "tied": KEYS,
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


def share(folder, refits: int):
    """A producer's process: this many refits, with new values in new memory each time."""

    def producer(group):
        files = Files(folder)
        shared = [IpcExport(parameters(files, seed), 0, [0], None, files) for seed in range(refits)]
        return [DirectSender(plan(), group, one).send().seconds for one in shared]

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
        destinations = CopyReplayLoader(engine.load, engine.memory.values())
        receiver = DirectReceiver(plan(bucket_bytes), group, RECIPE, CPU, "full", files)
        for _ in range(refits):
            receiver.receive(destinations)
            assert not files.now_open
            seen.append((engine.seen(), engine.calls))
        return seen, files.opened_in_all

    return consumer


@pytest.mark.parametrize("consumers", [1, 2])
def test_after_the_first_refit_weights_go_straight_to_their_places(tmp_path, consumers):
    times, *engines = run([share(tmp_path, 3)] + [fill(tmp_path, 3)] * consumers)
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
    _, (seen, _) = run([share(tmp_path, 3), fill(tmp_path, 3, takes_apart)])
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
    _, (seen, _) = run([share(tmp_path, 3), fill(tmp_path, 3, load_more)])
    for seed, (weights, _) in enumerate(seen):
        alone = Engine(load_more)
        alone.load(list(expected(seed).items()))
        for name, tensor in alone.seen().items():
            assert same_bytes(weights[name], tensor), (seed, name)


def test_without_an_engine_buckets_are_put_together(tmp_path):
    def consumer(group):
        files = Files(tmp_path)
        receiver = DirectReceiver(plan(), group, RECIPE, CPU, "full", files)
        refits = [consume(receiver) for _ in range(2)]
        return [weights for weights, _ in refits], refits[-1][1]

    _, (seen, report) = run([share(tmp_path, 2), consumer])
    for seed, weights in enumerate(seen):
        assert list(weights) == list(PLAN_SHAPES)
        assert all(same_bytes(weights[name], tensor) for name, tensor in expected(seed).items())
    assert set(report.seconds) == {"transfer"}


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 4), (2, 50)])
def test_what_is_compared_slab_by_slab_is_all_of_it(shape, monkeypatch):
    monkeypatch.setattr(ipc, "_COMPARED", 8)
    tensor = torch.rand(shape)
    assert torch.equal(torch.cat([slab.flatten() for slab in ipc._slabs(tensor)]), tensor.flatten())


@pytest.mark.parametrize("verify", ["off", "sample", "full"])
def test_a_weight_that_was_not_copied_is_named(tmp_path, verify):
    def consumer(group):
        engine, files = Engine(), Files(tmp_path)
        destinations = CopyReplayLoader(engine.load, engine.memory.values())
        receiver = DirectReceiver(plan(), group, RECIPE, CPU, verify, files)
        receiver.receive(destinations)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ipc.CopyTable, "run", lambda self, bases: None)
            try:
                receiver.receive(destinations)
            finally:
                assert not files.now_open
        return "not looked at"

    _, result = run([share(tmp_path, 2), consumer], SHORT)
    if verify == "off":
        assert result == "not looked at"
    else:
        assert isinstance(result, RefitError) and "the engine's q differs from the policy's" in str(result)


def test_a_consumer_that_dies_ends_the_producers_wait(tmp_path):
    def consumer(group):
        def die():
            raise ValueError("died")

        DirectReceiver(plan(), group, RECIPE, CPU, "full", Files(tmp_path / "nowhere")).receive(Collected(die))

    error, died = run([share(tmp_path, 1), consumer], SHORT)
    assert isinstance(died, ValueError)
    assert isinstance(error, RefitError) and "the end of the refit" in str(error)


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.clone(), requires_grad=False)


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def test_equal_weights_move_to_the_engine_and_others_stay(files):
    matrix, norm, vocabulary = torch.randn(6, 80), torch.ones(16), torch.randn(10, 16)
    # Two of the engine's weights lie in one allocation, and its vocabulary is padded.
    both = files.new("both", torch.cat([matrix.flatten(), norm]), offset=512)
    padded = files.new("vocabulary", torch.cat([vocabulary, torch.zeros(2, 16)]))
    weights = share_weights([both[:480].view(6, 80), both[480:], padded, torch.tensor(3.0)], files)
    same = [frozen(matrix), frozen(norm), frozen(norm), frozen(vocabulary)]
    last_row_differs = matrix.clone()
    last_row_differs[5, 79] += 1
    # The order of rows, the shape, the dtype, a longer vocabulary; the last one is trained.
    unlike = [frozen(last_row_differs), frozen(matrix.flip(0)), frozen(matrix.view(12, 40)), frozen(norm.double())]
    unlike += [frozen(torch.cat([vocabulary, torch.zeros(3, 16)])), nn.Parameter(norm.clone())]
    values, places = [one.clone() for one in (*same, *unlike)], [one.data_ptr() for one in unlike]
    in_engine = SharedFrozenParams(files)
    frozen_bytes = in_engine.take(weights, [*same, *unlike])
    assert frozen_bytes.shared == 4 * (480 + 16 + 16 + 160) and frozen_bytes.twice == 4 * (3 * 480 + 2 * 16 + 13 * 16)
    assert all(one in in_engine for one in same) and not any(one in in_engine for one in unlike)
    assert [one.data_ptr() for one in unlike] == places
    assert all(map(torch.equal, (*same, *unlike), values))
    # What they read now is the engine's memory.
    both[0], padded[9, 15] = 7, 8
    assert same[0][0, 0] == 7 and same[3][9, 15] == 8
    assert files.now_open == 2


def test_memory_that_changes_is_noticed(files):
    weight = files.new("weight", torch.randn(4, 8))
    in_engine = SharedFrozenParams(files)
    in_engine.check()
    in_engine.take(share_weights([weight], files), [frozen(weight)])
    in_engine.check()
    weight[3, 7] = 0
    with pytest.raises(RefitError, match="weights that an engine shares with the policy have changed"):
        in_engine.check()
