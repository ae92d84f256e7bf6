"""What the run's machines and GPUs are doing, as its workers' heartbeats tell it: no worker is asked, or held up."""

from collections.abc import Sequence
from statistics import mean

from nemo_rl_lite.cluster.heartbeat import last_beats
from nemo_rl_lite.observability.system import Usage


class SystemUsage:
    """Of the machines that `workers` are on. Machine 0 is that of the first worker."""

    def __init__(self, workers: Sequence[str]):
        self._workers = list(workers)
        self._seen: dict[str, Usage] = {}
        self._means: dict[str, dict[str, float]] = {}
        self._nodes: list[str] = []

    def take(self) -> dict[str, float]:
        """Means since the last call, or those before where no sample was taken since: `node.0.cpu_util`,
        `node.0.gpu.3.mem_gb` and so on (see `System.sample`)."""
        values: dict[str, list[float]] = {}
        for beat in last_beats(self._workers):
            if beat.node not in self._nodes:
                self._nodes.append(beat.node)
            means = beat.usage.means_since(self._seen.get(beat.worker, Usage()))
            if means:
                self._seen[beat.worker], self._means[beat.worker] = beat.usage, means
            node = self._nodes.index(beat.node)
            for name, value in self._means.get(beat.worker, {}).items():
                values.setdefault(f"node.{node}.{name}", []).append(value)
        # Workers of a machine have all seen it, and those that share a GPU have seen that.
        return {name: mean(seen) for name, seen in values.items()}
