"""Reads the use of the run's machines and GPUs from its workers' heartbeats, without calling a worker."""

from collections.abc import Sequence
from statistics import mean

from nemo_rl_lite.cluster.heartbeat import last_heartbeats
from nemo_rl_lite.observability.system import Usage


class SystemUsage:
    """The use of the machines of `workers`. Machine 0 is the first worker's."""

    def __init__(self, workers: Sequence[str]):
        self._workers = list(workers)
        self._seen: dict[str, Usage] = {}
        self._means: dict[str, dict[str, float]] = {}
        self._nodes: list[str] = []

    def take(self) -> dict[str, float]:
        """Means since the last call, or the previous means without a new sample: `node.0.cpu_util`,
        `node.0.gpu.3.mem_gb` and so on (see `System.sample`)."""
        values: dict[str, list[float]] = {}
        for one in last_heartbeats(self._workers):
            if one.node not in self._nodes:
                self._nodes.append(one.node)
            means = one.usage.means_since(self._seen.get(one.worker, Usage()))
            if means:
                self._seen[one.worker], self._means[one.worker] = one.usage, means
            node = self._nodes.index(one.node)
            for name, value in self._means.get(one.worker, {}).items():
                values.setdefault(f"node.{node}.{name}", []).append(value)
        # Several workers report the same machine, or the same GPU.
        return {name: mean(seen) for name, seen in values.items()}
