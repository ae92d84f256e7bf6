"""Ranks of which one has parameters that another one's tensors are made of, and their process group."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def linked_group(
    own: set[int] | None, groups: Sequence[dist.ProcessGroup], timeout_s: float
) -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks that this rank is linked with, itself among them, and their group; collective over the default group.

    `own`: the ranks that have what this one wants, None where it wants nothing. `groups`: there already; others are
    made where they are needed. No ranks where nobody needs this one, and no group where it is alone.
    """
    rank = dist.get_rank()
    together = linked({one: needed for one, needed in enumerate(everyones(own)) if needed is not None})
    ranks = next((ranks for ranks in together if rank in ranks), [])
    group: Any = next((one for one in groups if dist.get_process_group_ranks(one) == ranks), None)
    if not all(everyones(group is not None or len(ranks) < 2)):
        # NCCL's watchdog ends the process without a word of what it waited for: who waits for weights comes first.
        limit = timedelta(seconds=2 * timeout_s)
        made = {tuple(ranks): dist.new_group(ranks, timeout=limit) for ranks in together if len(ranks) > 1}
        group = made.get(tuple(ranks))
    return ranks, group if len(ranks) > 1 else None


def linked(sources: Mapping[int, set[int]]) -> list[list[int]]:
    """Ranks that need parameters of one another, in as many groups as there can be. `sources`: by rank that wants
    weights, the ranks that have them."""
    groups: list[set[int]] = []
    for rank, needed in sources.items():
        together = {rank} | needed
        for group in [group for group in groups if group & together]:
            groups.remove(group)
            together |= group
        groups.append(together)
    return sorted(sorted(group) for group in groups)


def everyones(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of the group gives, that of all ranks where none is said."""
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, own, group=group)
    return given
