"""The ranks of a group as data-parallel replicas, and the measurements of ranks combined into one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.offload.mover import Move
from nemo_rl_lite.policy.megatron.model import ParallelPlace


class Replicas:
    """A group of started workers, each of which has a `ParallelPlace`."""

    def __init__(self, group: WorkerGroup):
        self._group = group
        self._places: list[ParallelPlace] = wait(group.call("place"))
        self.count = self._places[0].data_size
        """The number of data-parallel replicas."""

    def call(self, method: str, own: Sequence[Sequence[Any]] | None = None, *common: Any, phase: str = "") -> list[Any]:
        """Call a method of every rank; returns the results of the ranks that stand for a replica, in the replicas'
        order. Each replica's `own` arguments are stored once and shared by its ranks."""
        shared = [[self._group.put(value) for value in values] for values in own or [()] * self.count]
        arguments = [(*shared[place.data_rank], *common) for place in self._places]
        results = wait(self._group.call_each(method, arguments, phase))
        reported = {p.data_rank: result for p, result in zip(self._places, results, strict=True) if p.reports}
        return [reported[replica] for replica in range(self.count)]


def idle_shares(replicas: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """See `Policy.take_waits`; from the seconds of each replica's passes, by phase. Replicas begin each pass at the
    same time."""
    found: dict[str, float] = {}
    for phase in replicas[0]:
        passes = list(zip(*(own[phase] for own in replicas), strict=True))
        slowest = sum(map(max, passes))
        found |= {phase: slowest, f"idle_share/{phase}": 1 - sum(map(sum, passes)) / len(replicas) / slowest}
    return found


def combine_moves(ranks: Sequence[Sequence[tuple[str, Move]]]) -> dict[str, Move]:
    """Moves by name, those of the slowest rank: ranks move at the same time, and a rank's moves of one name one after
    the other. The exposed time is the longest of any rank."""
    combined: dict[str, Move] = {}
    for name in sorted({name for moves in ranks for name, _ in moves}):
        of_ranks = [_in_turn([move for own, move in moves if own == name]) for moves in ranks]
        slowest = max(of_ranks, key=lambda move: move.transfer_s)
        combined[name] = replace(slowest, exposed_s=max(move.exposed_s for move in of_ranks))
    return combined


def _in_turn(moves: Sequence[Move]) -> Move:
    return Move(
        sum(move.nbytes for move in moves),
        sum(move.transfer_s for move in moves),
        sum(move.exposed_s for move in moves),
    )
