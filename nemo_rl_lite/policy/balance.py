"""Which replica trains on which sequences, so that no replica waits for another.

Responses to one prompt are alike in length, so that shares of neighbouring rows differ. `scripts/bench/dp_balance.py`
simulates how long replicas wait for each other with such shares, and with these.
"""

from collections.abc import Sequence


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
