"""Two policy ranks that have the weights together, and a tensor-parallel engine's ranks."""

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_rl_lite.errors import LostTouchError, RefitError
from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.engine import CopyReplayLoader
from nemo_rl_lite.refit.group import RefitGroup, Rendezvous
from nemo_rl_lite.refit.ipc import DirectReceiver, DirectSender, IpcExport, opened
from nemo_rl_lite.refit.layout import make_plan, same_bytes
from nemo_rl_lite.refit.trace import IndexTracer, trace_strided_copies
from tests.unit.refit.files import Files
from tests.unit.refit.ranks import CPU, SHORT, run

HIDDEN, ROWS, VOCABULARY = 6, 8, 7
# By number: rows and columns of layers split over two ranks, a padded vocabulary, and a norm that both have.
SHAPES = [(ROWS // 2, HIDDEN), (HIDDEN, ROWS // 2), (4, HIDDEN), (HIDDEN,)]
NAMES = ["up", "down", "embedding", "norm"]
PLAN = make_plan(
    [
        ("up", (ROWS, HIDDEN), "float32"),
        ("down", (HIDDEN, ROWS), "float32"),
        ("embedding", (VOCABULARY, HIDDEN), "float32"),
        ("norm", (HIDDEN,), "float32"),
    ],
    600,
)


def exported(shards: list[list[torch.Tensor]], rank: int) -> dict[str, torch.Tensor]:
    """As `rank` exports what the two ranks have."""
    up, down, embedding, _ = zip(*shards, strict=True)
    whole = torch.cat(up), torch.cat(down, dim=1), torch.cat(embedding)[:VOCABULARY], shards[rank][3]
    return dict(zip(NAMES, whole, strict=True))


def recipe(rank: int):
    numbering = IndexTracer(2, 10**3)
    numbers = [
        [numbering.number(one, number, torch.empty(shape)) for number, shape in enumerate(SHAPES)] for one in range(2)
    ]
    return {name: trace_strided_copies(tensor, numbering) for name, tensor in exported(numbers, rank).items()}


def shards(seed: int) -> list[list[torch.Tensor]]:
    torch.manual_seed(seed)
    own = [[torch.randn(shape) for shape in SHAPES] for _ in range(2)]
    own[1][3] = own[0][3].clone()
    return own


class EngineRank:
    """Halves of the layers, and more of the vocabulary on the first rank than the policy's first rank has."""

    def __init__(self, rank: int):
        self.rank, self.calls = rank, 0
        rows = (5, VOCABULARY - 5)[rank]
        self.memory = {
            "up": torch.zeros(ROWS // 2, HIDDEN),
            "down": torch.zeros(HIDDEN, ROWS // 2),
            "embedding": torch.zeros(rows, HIDDEN),
            "norm": torch.zeros(HIDDEN),
        }

    def parts(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        half = ROWS // 2
        if name == "up":
            return tensor[self.rank * half :][:half]
        if name == "down":
            return tensor[:, self.rank * half :][:, :half]
        return (tensor[:5], tensor[5:])[self.rank] if name == "embedding" else tensor

    def load(self, named):
        self.calls += 1
        for name, tensor in named:
            self.memory[name].copy_(self.parts(name, tensor))
        return set(self.memory)


def joined(port: int, rank: int, timeout_s: float) -> RefitGroup:
    """A policy rank and the engine rank on its device; the limit is for what comes after."""
    group = refit_group.join_at(Rendezvous("127.0.0.1", port, rank, 2), CPU, 60)
    return replace(group, timeout=timedelta(seconds=timeout_s))


def policy_rank(rank: int, port: int, own_port: int, folder: Path, timeout_s: float, refits: int):
    """Shares this many times, with new values in new files; what it found before, and how it ended."""

    def main(_):
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        group = joined(own_port, 0, timeout_s)
        files, openable = Files(folder), None
        for seed in range(refits):
            own = {
                number: files.new(f"{rank} {number} {seed}", tensor, offset=64 * number)
                for number, tensor in enumerate(shards(seed)[rank])
            }
            sharing = IpcExport(own, rank, [0, 1], dist.group.WORLD, files)
            if openable is None:
                openable = sharing.on_one_machine() and sharing.can_be_opened()
                with sharing.together() as parameters:
                    assert len(parameters) == 8
                    assert all(parameters[rank, number] is tensor for number, tensor in own.items())
                    theirs = parameters[1 - rank, 0].view(torch.float32).view(SHAPES[0])
                    assert same_bytes(theirs, shards(seed)[1 - rank][0])
                assert not files.now_open
            DirectSender(PLAN, group, sharing).send()
        return openable

    return main


def engine_rank(rank: int, own_port: int, folder: Path, timeout_s: float, refits: int, dies: bool = False):
    """What it has and how often its loader was called after each refit, and how many files each refit opened."""

    def main(_):
        group = joined(own_port, 1, timeout_s)
        files, engine, seen, opened_in_all = Files(folder), EngineRank(rank), [], [0]
        destinations = CopyReplayLoader(engine.load, engine.memory.values())
        receiver = DirectReceiver(PLAN, group, recipe(rank), CPU, "full", files)
        for _ in range(refits):
            if dies:
                raise ValueError("died")
            receiver.receive(destinations)
            opened_in_all.append(files.opened_in_all)
            seen.append(({name: tensor.clone() for name, tensor in engine.memory.items()}, engine.calls))
        return seen, [after - before for before, after in pairwise(opened_in_all)]

    return main


def run_all(folder: Path, refits: int = 3, limit_s: float = 60.0, dying: int | None = None) -> list:
    """The policy's two ranks, then the engine's."""
    policy, *stores = (refit_group.host_store("127.0.0.1", 60) for _ in range(3))
    policy_ranks = [policy_rank(rank, policy.port, stores[rank].port, folder, limit_s, refits) for rank in range(2)]
    engine_ranks = [
        engine_rank(rank, stores[rank].port, folder, limit_s, refits, dies=rank == dying) for rank in range(2)
    ]
    return run([*policy_ranks, *engine_ranks])


def test_each_engine_rank_copies_its_parts_from_wherever_they_are(tmp_path):
    first, second, *engines = run_all(tmp_path)
    assert first is True and second is True
    for rank, (seen, opened_each_time) in enumerate(engines):
        for seed, (weights, calls) in enumerate(seen):
            assert calls == len(PLAN.buckets) == 3
            whole = exported(shards(seed), rank)
            for name, tensor in weights.items():
                assert same_bytes(tensor, EngineRank(rank).parts(name, whole[name]).contiguous()), (seed, rank, name)
        # All of both ranks at first. Then those of the rank on its device, and for the first rank a row of the other's
        # vocabulary.
        assert opened_each_time == [8, 5 - rank, 5 - rank]


def test_a_refit_that_fails_at_one_rank_ends_that_of_all(tmp_path):
    first, second, _, died = run_all(tmp_path, refits=1, limit_s=SHORT, dying=1)
    assert isinstance(died, ValueError)
    assert isinstance(second, LostTouchError) and "rank 0 could not broadcast the plan's hash" in str(second)
    assert isinstance(first, LostTouchError) and str(first) == "the refit failed on policy rank 1"


class Closed(Files):
    """Memory that cannot be shared."""

    def handle(self, address):
        raise RefitError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE")


class Unreachable(Files):
    """Memory that another process cannot get at."""

    def opened(self, handles):
        raise RefitError("cuIpcOpenMemHandle: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")


class TwoRanks(IpcExport):
    """Together with a rank that is like this one."""

    def _all_gather(self, own):
        return [own, own]


@pytest.mark.parametrize("memory", [Files, Closed, Unreachable])
def test_memory_that_cannot_be_opened_is_seen_at_the_start(memory, tmp_path):
    files = memory(tmp_path)
    sharing = TwoRanks({0: files.new("weights", torch.randn(4))}, 0, [0, 1], None, files)
    assert sharing.can_be_opened() == (memory is Files)
    if memory is Closed:
        with pytest.raises(RefitError, match="cuIpcGetMemHandle"):
            sharing.addresses()


def test_only_what_is_wanted_is_opened(tmp_path):
    files = Files(tmp_path)
    own = {number: files.new(f"{number}", torch.full((3,), float(number))) for number in (2, 5)}
    addresses = IpcExport(own, 4, [4], None, files).addresses()
    with opened(addresses, files, {(4, 5)}) as parameters:
        assert list(parameters) == [(4, 5)] and files.now_open == 1
        assert same_bytes(parameters[4, 5].view(torch.float32), own[5])
    with opened(addresses, files) as parameters:
        assert set(parameters) == {(4, 2), (4, 5)}
