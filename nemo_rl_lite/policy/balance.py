"""Distribute items over replicas, with similar sums of costs."""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heapreplace

# Swaps end when the largest share is this close to the mean, or after this number.
NEAR, MOST_SWAPS = 0.01, 64
# Candidates for each swap, and the largest difference of rank by size between its two items.
TRIED, APART = 128, 4
# Assumed time of an item that ranks share, as a multiple of its work: padding and communication.
SHARED = 1.1


def even_work(costs: Sequence[float], replicas: int, most: int | None = None) -> list[list[int]]:
    """Return the indices of each replica's items, in ascending order, with similar sums of `costs`.

    Items go to the replica with the smallest sum, most expensive first. Each replica has an item if there are as many,
    and at most `most`.
    """
    shares: list[list[int]] = [[] for _ in range(replicas)]
    emptiest = [(0.0, 0, replica) for replica in range(replicas)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        total, count, replica = emptiest[0]
        shares[replica].append(index)
        if count + 1 == most:
            heappop(emptiest)
        else:
            heapreplace(emptiest, (total + costs[index], count + 1, replica))
    return [sorted(share) for share in shares]


def split_longest(costs: Sequence[float], ranks: int, too_long: Sequence[bool]) -> tuple[list[int], list[list[int]]]:
    """Return the indices of the items that all ranks share, and of each rank's other items, in ascending order.

    Ranks share the items that are `too_long` for one, and as many of the most expensive others as give the shortest
    time: that of shared items, and of the rank with the most work of others.
    """
    order = sorted(range(len(costs)), key=lambda index: (not too_long[index], -costs[index], index))
    found, shortest = (order, [list[int]() for _ in range(ranks)]), SHARED * sum(costs) / ranks
    for count in range(sum(too_long), len(order)):
        shared, rest = SHARED * sum(costs[index] for index in order[:count]), sorted(order[count:])
        left = [costs[index] for index in rest]
        if shared + sum(left) >= shortest * ranks:
            # More shared items only take longer.
            break
        shares = even_work(left, ranks)
        time = shared / ranks + max(sum(left[place] for place in share) for share in shares)
        if time < shortest:
            found, shortest = (order[:count], [[rest[place] for place in share] for share in shares]), time
    shared_items, of_ranks = found
    return sorted(shared_items), of_ranks


def swapped(
    shares: Sequence[Sequence[int]], sizes: Sequence[float], work: Callable[[Sequence[int]], float]
) -> list[list[int]]:
    """Balance the `work` of shares by swapping items of similar `sizes`.

    The share with the most work swaps with one of the two with the least. Work may depend on the combination of items,
    as padding does.
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
    """Yield both shares after each of up to `TRIED` swaps of two items of similar but unequal size."""
    mine, theirs = (sorted(share, key=lambda index: (-sizes[index], index)) for share in (one, other))
    pairs = [
        (a, b)
        for place, a in enumerate(mine)
        for b in theirs[max(0, place - APART) : place + APART + 1]
        if sizes[a] != sizes[b]
    ]
    for a, b in pairs[:: max(1, -(-len(pairs) // TRIED))]:
        yield [b if index == a else index for index in one], [a if index == b else index for index in other]
