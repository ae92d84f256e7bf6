"""Groups of ranks of which one has parameters that another one's tensors are made of."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def group_by_need(
    needed: set[int] | None, groups: Sequence[dist.ProcessGroup], timeout_s: float
) -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks that this rank shares weights with, itself included, and their process group; collective over the
    default group.

    `needed`: the ranks whose parameters this rank's weights are made of, None if it wants no weights. `groups`:
    existing groups, which are used where they fit. Returns no ranks if no rank needs this one, and no group for a
    single rank.
    """
    rank = dist.get_rank()
    together = connected({one: ranks for one, ranks in enumerate(all_gather(needed)) if ranks is not None})
    ranks = next((ranks for ranks in together if rank in ranks), [])
    group: Any = next((one for one in groups if dist.get_process_group_ranks(one) == ranks), None)
    if not all(all_gather(group is not None or len(ranks) < 2)):
        # NCCL's watchdog ends the process without saying what it waited for, so the refit's own limit comes first.
        limit = timedelta(seconds=2 * timeout_s)
        made = {tuple(ranks): dist.new_group(ranks, timeout=limit) for ranks in together if len(ranks) > 1}
        group = made.get(tuple(ranks))
    return ranks, group if len(ranks) > 1 else None


def connected(needs: Mapping[int, set[int]]) -> list[list[int]]:
    """The connected components of ranks. `needs`: for each rank that wants weights, the ranks that have them."""
    groups: list[set[int]] = []
    for rank, needed in needs.items():
        together = {rank} | needed
        for group in [group for group in groups if group & together]:
            groups.remove(group)
            together |= group
        groups.append(together)
    return sorted(sorted(group) for group in groups)


def all_gather(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of the group passes, in the ranks' order; of the default group if none is given."""
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, own, group=group)
    return given
