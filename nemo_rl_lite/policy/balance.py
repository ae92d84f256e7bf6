"""Which replica trains on which sequences, so that no replica waits for another.

Responses to one prompt are alike in length, so that shares of neighbouring rows differ.
"""

from collections.abc import Callable, Iterator, Sequence

Work = Callable[[Sequence[int]], float]
"""How much work a share is, from the indices of its items."""

# Swaps end where the share with the most work has this much more than the mean, or after this number of them.
NEAR, MOST_SWAPS = 0.01, 64
# Swaps of the most loaded share that are tried before the best one is made, and how far apart by size the two items
# are at most: like items for like ones change a share's work a little, which is what is missing at the end.
TRIED, APART = 128, 4


def even_shares(costs: Sequence[float], replicas: int) -> list[list[int]]:
    """The indices of each replica's items: as many for each, nearly equal sums of `costs`, in ascending order.

    The items are taken in blocks of `replicas`, the most expensive first, and each block's most expensive item goes to
    the replica with the smallest sum.

    Raises:
        ValueError: the number of items is no multiple of `replicas`.
    """
    if len(costs) % replicas:
        raise ValueError(f"{len(costs)} items cannot be shared evenly by {replicas} replicas")
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    shares: list[list[int]] = [[] for _ in range(replicas)]
    sums = [0.0] * replicas
    for start in range(0, len(order), replicas):
        emptiest_first = sorted(range(replicas), key=lambda replica: (sums[replica], replica))
        for replica, index in zip(emptiest_first, order[start : start + replicas], strict=True):
            shares[replica].append(index)
            sums[replica] += costs[index]
    return [sorted(share) for share in shares]


def swapped(shares: Sequence[Sequence[int]], sizes: Sequence[float], work: Work) -> list[list[int]]:
    """The shares after swaps that bring their `work` together; each keeps its number of items.

    Work may depend on which items meet in a share, as padding does. The share with the most work swaps an item with one
    of the two that have the least; `sizes` say which items are alike.
    """
    current = [sorted(share) for share in shares]
    works = [work(share) for share in current]
    for _ in range(MOST_SWAPS):
        by_work = sorted(range(len(works)), key=works.__getitem__)
        most, least = by_work[-1], by_work[:-1][:2]
        if works[most] <= (1 + NEAR) * sum(works) / len(works):
            break
        for other in least:
            tried = [[sorted(share) for share in pair] for pair in _swaps(current[most], current[other], sizes)]
            after = [[work(share) for share in pair] for pair in tried]
            best = min(range(len(tried)), key=lambda index: max(after[index]), default=None)
            if best is not None and max(after[best]) < works[most]:
                current[most], current[other] = tried[best]
                works[most], works[other] = after[best]
                break
        else:
            break
    return current


def _swaps(one: Sequence[int], other: Sequence[int], sizes: Sequence[float]) -> Iterator[tuple[list[int], list[int]]]:
    """Both shares after each of at most `TRIED` swaps of two items that are near in the order of sizes but unequal."""
    mine, theirs = (sorted(share, key=lambda index: (-sizes[index], index)) for share in (one, other))
    pairs = [
        (a, b)
        for place, a in enumerate(mine)
        for b in theirs[max(0, place - APART) : place + APART + 1]
        if sizes[a] != sizes[b]
    ]
    for a, b in pairs[:: max(1, -(-len(pairs) // TRIED))]:
        yield [b if index == a else index for index in one], [a if index == b else index for index in other]
