"""The shares of an optimizer step's sequences, one for each data-parallel replica, with nearly equal work."""

from collections.abc import Callable, Sequence
from itertools import batched

from nemo_rl_lite.policy.balance import even_shares, swapped
from nemo_rl_lite.policy.megatron.micro_batches import Layout

Cost = Callable[[int], float]
"""How much work a sequence of this many tokens is, in any unit."""


def balanced_shares(
    lengths: Sequence[int], replicas: int, cost: Cost, together: int = 1, layout: Layout | None = None
) -> list[list[int]]:
    """Each replica's sequences, in ascending order: as many for each; `together` neighbours stay together.

    Without a `layout`, the work of a share is the sum of its sequences' costs; with one, the work of the micro-batches
    into which the replica cuts it, padding included.

    Raises:
        ValueError: the sequences cannot be shared evenly.
    """
    groups = [sum(map(cost, own)) if layout is None else work(own, layout, cost) for own in batched(lengths, together)]
    shares = even_shares(groups, replicas)
    if layout is not None and replicas > 1:
        # All replicas make as many micro-batches as the one that needs most.
        count = max(len(layout.groups(_lengths(share, lengths, together))) for share in shares)
        shares = swapped(shares, groups, lambda share: work(_lengths(share, lengths, together), layout, cost, count))
    return [[group * together + place for group in share for place in range(together)] for share in shares]


def work(lengths: Sequence[int], layout: Layout, cost: Cost, micro_batches: int = 1) -> float:
    """The cost of sequences that are cut into at least `micro_batches`, each padded to its longest sequence."""
    if layout.mode == "packed":
        return sum(map(cost, lengths))
    groups = layout.groups(lengths, micro_batches)
    return sum(len(group) * cost(layout.rounded(max(lengths[row] for row in group))) for group in groups)


def _lengths(share: Sequence[int], lengths: Sequence[int], together: int) -> list[int]:
    return [length for group in share for length in lengths[group * together : (group + 1) * together]]
