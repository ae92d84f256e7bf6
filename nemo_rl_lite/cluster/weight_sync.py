"""A refit across the two groups of workers: connect once, then new weights whenever the loop asks."""

import time
from dataclasses import dataclass

import torch

from nemo_rl_lite.cluster.workers import wait
from nemo_rl_lite.config.schema import RefitConfig
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.generation.remote import RemoteGeneration
from nemo_rl_lite.policy.remote import RemotePolicy
from nemo_rl_lite.refit.broadcast import RefitReport, compare_checksums
from nemo_rl_lite.refit.plan import RefitPlan

# Token ids that every vocabulary has. What they mean does not matter.
PROBE_PROMPT = [1, 2, 3, 4, 5, 6]
PROBE_TOKENS = 4


@dataclass(frozen=True)
class ProbeSettings:
    """How the probe samples and what difference of logprobs (nats) it tolerates."""

    temperature: float
    tolerance: float
    rows: int
    """Sequences the policy scores at once on all replicas: it is given that many copies."""


class WeightSync:
    """Broadcast from policy rank 0 to every generation engine, checked on both sides."""

    def __init__(
        self,
        policy: RemotePolicy,
        generation: RemoteGeneration,
        config: RefitConfig,
        probe: ProbeSettings,
        limit_s: float,
    ):
        self._policy, self._generation, self._config, self._probe = policy, generation, config, probe
        trainers, generators = policy.group, generation.group
        self._plan: RefitPlan = wait(trainers.call("plan_refit"), timeout_s=limit_s)[0]
        host, _ = trainers.address(limit_s)
        port = wait(trainers.call("open_refit", host), timeout_s=limit_s)[0]
        world_size = 1 + len(generators)
        ranks = range(1, world_size)
        wait(
            trainers.call("join_refit", world_size),
            generators.call_each("join_refit", [(self._plan, host, port, rank, world_size) for rank in ranks]),
            timeout_s=limit_s,
        )

    def refit(self) -> dict[str, float]:
        """Bring the policy's weights to every engine and compare the two sides; returns metrics.

        Raises:
            RefitError: a consumer received other bytes than were sent, or computes something else with them.
            WorkerError: a bucket did not get through.
        """
        started = time.perf_counter()
        send = self._policy.group.call("send_weights", phase="refit")
        receive = self._generation.group.call("receive_weights", phase="refit")
        reports: list[RefitReport | None] = wait(send, receive)
        sent, received = reports[0], [report for report in reports[len(self._policy.group) :] if report is not None]
        if sent is None:
            raise RuntimeError("policy rank 0 sent no report")
        compare_checksums(self._plan, sent, received)
        seconds = time.perf_counter() - started
        metrics = {f"{stage}_s": value for stage, value in sent.seconds.items()}
        metrics |= {
            "load_s": max(report.seconds["load"] for report in received),
            "bytes": float(self._plan.nbytes),
            "buckets": float(len(self._plan.buckets)),
            "seconds": seconds,
            "gb_per_s": self._plan.nbytes / seconds / 1e9,
        }
        return metrics | (self.probe() if self._config.verify != "off" else {})

    def probe(self) -> dict[str, float]:
        """Let every engine sample a short sequence and the policy score it: the logprobs must agree.

        Raises:
            RefitError: naming the engine and the difference.
        """
        started = time.perf_counter()
        sampling = Sampling(
            self._probe.temperature, 1.0, None, PROBE_TOKENS, stop_token_ids=(), stop_strings=(), seed=1
        )
        engines = len(self._generation.group)
        completions = self._generation.generate([PROBE_PROMPT] * engines, sampling)
        worst = 0.0
        for engine, completion in enumerate(completions):
            tokens_1T = torch.tensor([[*PROBE_PROMPT, *completion.tokens]])
            scored = self._policy.logprobs(tokens_1T.repeat(self._probe.rows, 1))[0, len(PROBE_PROMPT) :]
            difference = (scored - torch.tensor(completion.logprobs)).abs().max().item()
            if difference > self._probe.tolerance:
                raise RefitError(
                    f"generation rank {engine} and the policy give the tokens of a probe logprobs that differ by up to "
                    f"{difference:.4f} nats after the refit (limit {self._probe.tolerance:g}, refit.probe_tolerance)"
                )
            worst = max(worst, difference)
        return {"probe_logprob_diff": worst, "probe_s": time.perf_counter() - started}
