"""A refit across the two groups of workers: connect once, then new weights whenever the loop asks."""

import time

from nemo_rl_lite.cluster.workers import WorkerGroup, wait
from nemo_rl_lite.refit.broadcast import RefitReport, compare_checksums
from nemo_rl_lite.refit.plan import RefitPlan


class WeightSync:
    """Broadcast from policy rank 0 to every generation engine."""

    def __init__(self, policy: WorkerGroup, generation: WorkerGroup):
        self._policy, self._generation = policy, generation
        self._plan: RefitPlan = wait(policy.call("plan_refit"))[0]
        host, _ = policy.address()
        port = wait(policy.call("open_refit", host))[0]
        world_size = 1 + len(generation)
        ranks = range(1, world_size)
        wait(
            policy.call("join_refit", world_size),
            generation.call_each("join_refit", [(self._plan, host, port, rank, world_size) for rank in ranks]),
        )

    def refit(self) -> dict[str, float]:
        """Bring the policy's weights to every engine; returns metrics.

        Raises:
            RefitError: a consumer received other bytes than were sent, or a bucket did not get through.
        """
        started = time.perf_counter()
        send, receive = (
            self._policy.call("send_weights", phase="refit"),
            self._generation.call("receive_weights", phase="refit"),
        )
        reports: list[RefitReport | None] = wait(send, receive)
        sent, received = reports[0], [report for report in reports[len(self._policy) :] if report is not None]
        if sent is None:
            raise RuntimeError("policy rank 0 sent no report")
        compare_checksums(self._plan, sent, received)
        seconds = time.perf_counter() - started
        metrics = {f"{stage}_s": value for stage, value in sent.seconds.items()}
        return metrics | {
            "load_s": max(report.seconds["load"] for report in received),
            "bytes": float(self._plan.nbytes),
            "buckets": float(len(self._plan.buckets)),
            "seconds": seconds,
            "gb_per_s": self._plan.nbytes / seconds / 1e9,
        }
