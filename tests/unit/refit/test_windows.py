"""Pieces that policy ranks send to engine ranks: for any layout each of its bytes once, and evenly."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_lite.refit import windows as windows_module
from nemo_rl_lite.refit.group import host_store
from nemo_rl_lite.refit.interface import Loader, Window, compare_checksums
from nemo_rl_lite.refit.layout import CopyList, view
from nemo_rl_lite.refit.trace import IndexTracer, Segment, StridedView, segments_of_window, trace_strided_copies
from nemo_rl_lite.refit.windows import (
    Piece,
    Transfer,
    WindowExport,
    WindowReceiver,
    WindowRoutes,
    _PieceLoader,
    find_replicas,
    needed_pieces,
    route,
    sent_to,
)
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.refit.ranks import CPU, run

HIDDEN, LAYERS, EXPERTS, VOCABULARY = 16, 4, 8, 32


@dataclass(frozen=True)
class Policy:
    """Layout of a policy: a rank's coordinates in Megatron's order, tensor first and pipeline last."""

    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    """`dp` counts model replicas, `ep` ranks of each share dense parameters."""

    @property
    def ranks(self) -> int:
        return self.tp * self.ep * self.dp * self.pp

    def rank(self, tp: int, ep: int, dp: int, pp: int) -> int:
        return tp + self.tp * (ep + self.ep * (dp + self.dp * pp))


class Model:
    """A small mixture of experts, sharded over the ranks of a layout: its tensors, parameters, recipe and replicas."""

    def __init__(self, layout: Policy):
        self.layout, self.tensors = layout, dict[str, Tensor]()
        self.parameters: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self.recipe, self.replicas = dict[str, list[Segment]](), dict[tuple[int, int], list[int]]()
        self._numbers = 0
        # Embedding and LM head are tied, in the first stage.
        self._add(["embedding", "head"], (VOCABULARY, HIDDEN), 0, cut=0)
        for layer in range(LAYERS):
            stage = layer * layout.pp // LAYERS
            self._add([f"{layer}.norm"], (HIDDEN,), stage)
            self._add([f"{layer}.q"], (3 * HIDDEN, HIDDEN), stage, cut=0)
            self._add([f"{layer}.o"], (HIDDEN, HIDDEN), stage, cut=1)
            for expert in range(EXPERTS):
                self._add([f"{layer}.{expert}"], (HIDDEN, HIDDEN), stage, cut=0, ep=expert * layout.ep // EXPERTS)

    def _add(self, names: list[str], shape: tuple[int, ...], pp: int, cut: int | None = None, ep: int | None = None):
        """Add a parameter. `cut`: the axis of its tensor-parallel shards; `ep`: the ranks that have an expert."""
        layout, number = self.layout, self._numbers
        self._numbers += 1
        whole = torch.randn(shape)
        shards = [whole] if cut is None else [one.contiguous() for one in whole.chunk(layout.tp, cut)]
        of_expert = range(layout.ep) if ep is None else [ep]
        for index, shard in enumerate(shards):
            of_shard = range(layout.tp) if cut is None else [index]
            holders = [layout.rank(tp, one, dp, pp) for tp in of_shard for one in of_expert for dp in range(layout.dp)]
            for rank in holders:
                self.parameters[rank][number] = shard.clone()
            self.replicas[min(holders), number] = sorted(holders)
        numbering = IndexTracer(layout.ranks, whole.numel())
        owners = [layout.rank(index if cut is not None else 0, of_expert[0], 0, pp) for index in range(len(shards))]
        numbers = [numbering.number(rank, number, shard) for rank, shard in zip(owners, shards, strict=True)]
        segments = trace_strided_copies(torch.cat(numbers, cut or 0), numbering)
        assert segments is not None
        for name in names:
            self.tensors[name], self.recipe[name] = whole, segments

    @property
    def nbytes(self) -> int:
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.tensors.values()}.values())


@dataclass(frozen=True)
class Engine:
    """Layout of an engine: `tp` ranks share each matrix, also of experts, or have whole experts with `by_expert`."""

    tp: int = 1
    engines: int = 1
    by_expert: bool = False

    def windows(self, model: Model, rank: int) -> dict[str, StridedView]:
        found = dict[str, StridedView]()
        for name, tensor in model.tensors.items():
            part = tensor
            is_expert = name.count(".") == 1 and name.split(".")[1].isdigit()
            if is_expert and self.by_expert:
                if int(name.split(".")[1]) * self.tp // EXPERTS != rank:
                    continue
            elif tensor.dim() == 2:
                part = tensor.chunk(self.tp, 1 if name.endswith(".o") else 0)[rank]
            found[name] = StridedView(part.storage_offset(), tuple(part.shape), part.stride())
        return found

    def needs(self, model: Model) -> dict[int, list[tuple[Piece, Segment]]]:
        needs: dict[int, list[tuple[Piece, Segment]]] = defaultdict(list)
        for rank in range(self.tp):
            for name, window in self.windows(model, rank).items():
                segments = segments_of_window(model.recipe[name], model.tensors[name].numel(), window)
                assert segments is not None
                for one in segments:
                    needs[rank].append((Piece(one.rank, one.parameter, one.source, "float32", name), one))
        return needs

    def transfers(self, model: Model, bucket_bytes: int) -> list[Transfer]:
        needs = {rank: [piece for piece, _ in own] for rank, own in self.needs(model).items()}
        return [one.shifted(self.tp, self.engines) for one in route(needs, model.replicas, bucket_bytes)]


POLICIES = [
    Policy(),
    Policy(tp=2),
    Policy(dp=2),
    Policy(pp=2),
    Policy(tp=2, pp=2),
    Policy(tp=2, dp=2),
    Policy(ep=4),
    Policy(tp=4, ep=2),
    Policy(tp=2, ep=2, dp=2, pp=2),
]
ENGINES = [Engine(), Engine(engines=3), Engine(tp=2), Engine(tp=4, engines=2), Engine(tp=4, by_expert=True, engines=2)]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("bucket_bytes", [5000, 10**9])
def test_every_engine_rank_gets_each_byte_that_it_needs_once(policy, engine, bucket_bytes):
    model = Model(policy)
    needs, transfers = engine.needs(model), engine.transfers(model, bucket_bytes)
    for receiver in range(engine.tp * engine.engines):
        windows = engine.windows(model, receiver % engine.tp)
        weights = {name: torch.full(window.sizes, 7.0) for name, window in windows.items()}
        arrived = dict[Piece, Tensor]()
        for one in transfers:
            if receiver in one.receivers:
                buffer = torch.zeros(one.bucket.nbytes, dtype=torch.uint8)
                sent = [piece.source.of(model.parameters[one.sender][piece.parameter]) for piece in one.pieces]
                CopyList([view(buffer, slot) for slot in one.bucket.slots], sent).run()
                assert not arrived.keys() & set(one.pieces)
                arrived |= dict(zip(one.pieces, (view(buffer, slot) for slot in one.bucket.slots), strict=True))
        wanted = needs[receiver % engine.tp]
        assert arrived.keys() == {piece for piece, _ in wanted}
        for piece, segment in wanted:
            segment.target.of(weights[piece.name]).copy_(arrived[piece])
        for name, window in windows.items():
            assert torch.equal(weights[name], window.of(model.tensors[name])), name


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_policy_sends_the_model_once_and_its_replicas_send_equal_shares(policy, engine):
    model = Model(policy)
    sent = Counter[int]()
    for one in engine.transfers(model, 500):
        sent[one.sender] += one.nbytes
    assert sum(sent.values()) == model.nbytes
    largest = VOCABULARY * HIDDEN * 4
    for pp in range(policy.pp):
        own = [rank for rank in range(policy.ranks) if rank // (policy.ranks // policy.pp) == pp]
        assert max(sent[rank] for rank in own) - min(sent[rank] for rank in own) <= 2 * largest


def test_an_engine_rank_receives_its_share():
    """Two policy ranks and an engine of two: half the matrices each, and all norms."""
    model = Model(Policy(tp=2))
    norms = LAYERS * HIDDEN * 4
    received = Counter[int]()
    for one in Engine(tp=2).transfers(model, 10**9):
        received.update(dict.fromkeys(one.receivers, one.nbytes))
    assert set(received.values()) == {(model.nbytes - norms) // 2 + norms}


def test_replicas_serve_different_receivers_at_once():
    """Two policy replicas, and an engine of two ranks: each replica has one of them, apart from what both need."""
    transfers = Engine(tp=2).transfers(Model(Policy(dp=2)), 10_000)
    alone = [one.stream for one in transfers if len(one.receivers) == 1]
    assert alone[:2] == [(0, (0,)), (1, (1,))] and set(alone) == {*alone[:2]}


def test_a_share_that_is_smaller_than_a_bucket_is_not_divided():
    transfers = Engine(tp=2).transfers(Model(Policy(dp=2)), 10**9)
    assert {one.sender for one in transfers if len(one.receivers) == 1} == {0}


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_ranks_that_follow_the_order_never_deadlock(policy, engine, buffers):
    """A transfer is done when all its ranks have started it, and a rank starts as many as it has buffers."""
    transfers = engine.transfers(Model(policy), 2000)
    left: dict[tuple[str, int], list[Transfer]] = defaultdict(list)
    for one in transfers:
        for rank in (("policy", one.sender), *(("engine", rank) for rank in one.receivers)):
            left[rank].append(one)
    rounds = 0
    while any(left.values()):
        started = Counter[int]()
        for own in left.values():
            started.update(id(one) for one in own[:buffers])
        done = {id(one) for one in transfers if started[id(one)] == 1 + len(one.receivers)}
        assert done
        left = {rank: [one for one in own if id(one) not in done] for rank, own in left.items()}
        rounds += 1
    # Several senders with several sets of receivers send at the same time.
    senders, sets = {one.sender for one in transfers}, {one.receivers for one in transfers}
    assert rounds < len(transfers) or min(len(senders), len(sets)) == 1


def test_a_piece_that_several_tensors_have_is_sent_once():
    model = Model(Policy())
    names = [piece.name for one in Engine().transfers(model, 10**9) for piece in one.pieces]
    assert "embedding" in names and "head" not in names
    assert model.recipe["embedding"] == model.recipe["head"]


def test_export_routes_with_the_largest_bucket_as_limit():
    model = Model(Policy(tp=2))
    export = WindowExport(model.parameters[0], model.recipe, model.replicas, None, 5000, torch.device("cpu"))
    needs = {rank: [piece for piece, _ in own] for rank, own in Engine(tp=2).needs(model).items()}
    assert all(one.bucket.nbytes <= 5000 for one in export.route(needs))


class Copied(Loader):
    """An engine rank's loader after its first refit."""

    def __init__(self, windows: list[Window]):
        self._windows = windows

    def fill(self, arrived):
        raise AssertionError("windows need no loader")

    def windows(self):
        return self._windows


def exchange(model: Model, engine: Engine, devices: Sequence[torch.device]) -> None:
    """Send windows in a process for each rank, on the policy's `devices` first, and check what arrives. The policy
    trains before the second refit, and one weight of the last engine rank is not the policy's before the first."""
    transfers, policy = engine.transfers(model, 2000), model.layout.ranks
    config = compose_config(["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1"]).refit
    store, last = host_store("127.0.0.1", 60), engine.tp * engine.engines - 1
    address = "127.0.0.1", store.port

    def weights_of(rank: int) -> dict[str, Tensor]:
        windows = engine.windows(model, rank % engine.tp)
        return {name: one.of(model.tensors[name]).clone() for name, one in windows.items()}

    def device_of(process: int) -> torch.device:
        if devices[process].type == "cuda":
            torch.cuda.set_device(devices[process])
        return devices[process]

    def send(rank: int):
        device = device_of(rank)
        routes = WindowRoutes([one for one in transfers if one.sender == rank], None, address, config)
        parameters = {number: one.to(device) for number, one in model.parameters[rank].items()}
        sender = WindowExport(parameters, {}, {}, None, 2000, device).join(routes)
        sender.send()
        for parameter in parameters.values():
            parameter.add_(1)
        return sender.send()

    def receive(rank: int):
        device = device_of(policy + rank)
        routes = WindowRoutes([one for one in transfers if rank in one.receivers], rank, address, config)
        weights = {name: one.to(device) for name, one in weights_of(rank).items()}
        if rank == last:
            weights["2.o"][0, 0] += 1
        windows = [
            (name, model.tensors[name].numel(), window, weights[name])
            for name, window in engine.windows(model, rank % engine.tp).items()
        ]
        needed = needed_pieces(Copied(windows), model.recipe)
        assert needed is not None
        receiver = WindowReceiver(routes, needed, device)
        differing = receiver.first_differing()
        report = receiver.receive(Copied([]))
        return differing, report, {name: one.cpu() for name, one in weights.items()}

    ranks = [lambda group, rank=rank: send(rank) for rank in range(policy)]
    ranks += [lambda group, rank=rank: receive(rank) for rank in range(last + 1)]
    results = run(ranks)
    sent = results[:policy]
    for rank, (differing, report, weights) in enumerate(results[policy:]):
        assert differing == ("2.o" if rank == last else None)
        assert all(torch.equal(weights[name], before + 1) for name, before in weights_of(rank).items())
        compare_checksums(*sent_to(rank, transfers, sent), report, "")
        assert len(report.checksums) > 1


def test_windows_arrive_in_the_weights_of_each_engine_rank():
    """Two policy ranks, and two engines of two ranks, over gloo."""
    exchange(Model(Policy(tp=2)), Engine(tp=2, engines=2), [CPU] * 6)


def test_what_is_not_sent_is_found():
    """An engine finds this if its windows are not those of the first engine."""
    model = Model(Policy())
    needed = [(piece, torch.zeros(piece.source.sizes)) for piece, _ in Engine().needs(model)[0]]
    transfers = [replace(one, pieces=one.pieces[:-1]) for one in Engine().transfers(model, 10**9)]
    assert _PieceLoader(transfers, needed).differing == [f"{LAYERS - 1}.{EXPERTS - 1}"]


def test_a_loader_that_does_more_than_copy_needs_whole_tensors():
    class Computes(Copied):
        def windows(self):
            return None

    assert needed_pieces(Computes([]), {}) is None
    # A loader that has recorded nothing, as on CPUs.
    assert needed_pieces(Copied([]), {}) is None


def test_ranks_that_hold_the_same_parameter_are_found(monkeypatch):
    """Rank 0 of four: two tensor-parallel shards, two replicas; and a rank whose model is sharded in another way."""

    def recipe(shards: Sequence[int], norm: int) -> dict[str, list[Segment]]:
        rows = StridedView(0, (8,), (1,))
        matrix = [Segment(rank, 3, rows, replace(rows, begin=8 * index)) for index, rank in enumerate(shards)]
        return {"matrix": matrix, "norm": [Segment(norm, 5, rows, rows)]}

    of_ranks = [recipe([0, 1], 0), recipe([0, 1], 1), recipe([2, 3], 2), recipe([2, 3], 3), recipe([4], 4)]
    asked = list[Any]()
    monkeypatch.setattr(windows_module, "all_gather", lambda own: asked.append(own) or asked)
    monkeypatch.setattr(windows_module.torch.distributed, "get_rank", lambda: 1)
    for one in reversed(of_ranks[1:]):
        assert find_replicas(one) == {}
    asked.reverse()
    monkeypatch.setattr(windows_module, "all_gather", lambda own: [own, *asked])
    monkeypatch.setattr(windows_module.torch.distributed, "get_rank", lambda: 0)
    assert find_replicas(of_ranks[0]) == {(0, 3): [0, 2], (1, 3): [1, 3], (0, 5): [0, 1, 2, 3]}
