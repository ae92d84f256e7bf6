"""Refits the engines with the policy's weights: connects once, then sends new weights on request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl_lite.cluster.calls import Call, wait
from nemo_rl_lite.config.engines import engines_quantize, engines_serve_adapters, engines_share_weights
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import engine_ranks
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.interface import Request, Sampling
from nemo_rl_lite.refit.engine import Source
from nemo_rl_lite.refit.group import Rendezvous
from nemo_rl_lite.refit.interface import PROBE_TOLERANCE, PROBE_TOLERANCE_QUANTIZED, RefitReport, compare_checksums
from nemo_rl_lite.workers.generation import RemoteGeneration
from nemo_rl_lite.workers.policy import RemotePolicy

PROBE_TOKENS = 16


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of the probe after a refit. `prompt`: token ids of one of the run's prompts, as bfloat16 is less exact
    on random text. `tolerance`: limit on the mean logprob difference in nats."""

    prompt: list[int]
    tokens: int
    temperature: float
    tolerance: float

    @classmethod
    def of(cls, config: Config, prompt: Sequence[int]) -> "ProbeSettings":
        generation, tolerance = config.generation, PROBE_TOLERANCE[config.policy.precision]
        if engines_quantize(generation) or config.policy.megatron_cfg.fp8_cfg.enabled:
            tolerance = PROBE_TOLERANCE_QUANTIZED
        return cls(list(prompt), min(PROBE_TOKENS, generation.max_new_tokens), generation.temperature, tolerance)


class WeightSync:
    """Sends weights from the policy to every engine, checked on both sides.

    Colocated engine ranks receive from the policy rank on their device. Otherwise policy rank 0 sends to all.
    """

    def __init__(self, policy: RemotePolicy, generation: RemoteGeneration, config: Config, probe: ProbeSettings):
        self._policy, self._generation, self._probe = policy, generation, probe
        self._config = config.refit
        self._probing: dict[int, Call] = {}
        self.version = 0
        self._limit_s = config.cluster.start_timeout_s
        self._ranks_per_engine = engine_ranks(config)
        self._shared_device = config.generation.colocated.enabled
        self._producers = producers(policy.ranks, generation.engines * self._ranks_per_engine, self._shared_device)
        consumers = [self._producers.count(rank) for rank in range(policy.ranks)]
        adapters_alone = engines_serve_adapters(config.generation, config.policy)
        self._plan = policy.plan_refit(config.refit, self._shared_device, adapters_alone, consumers, self._limit_s)
        # Bytes that an engine takes when its weights wake up.
        self._engine_bytes = 0
        if self._shared_device:
            own = self._plan.nbytes // self._ranks_per_engine
            self._engine_bytes = generation.weight_bytes() if adapters_alone else own
        self._connected: list[int] = []
        self._connect(generation)
        self.shares_weights = engines_share_weights(config)
        """True if policy ranks use weights in the engines' memory."""
        if self.shares_weights:
            engine_of = dict(zip(self._producers, generation.share_weights(), strict=True))
            policy.use_shared_weights([engine_of.get(rank) for rank in range(policy.ranks)])

    def disconnect(self) -> None:
        """Connect again at the next refit, because engines are new."""
        self._connected = []

    def _connect(self, engines: RemoteGeneration) -> None:
        """Connect each rank of these engines, and no other, to its producer."""
        if self._connected == engines.live:
            return
        self._connected = []
        opened, joined, sources = self._policy.open_refit(self._limit_s), [0] * self._policy.ranks, []
        producers = self._producers_of(engines)
        consumers = [producers.count(rank) for rank in range(self._policy.ranks)]
        for producer in producers:
            joined[producer] += 1
            host, port, offer = opened[producer]
            rendezvous = Rendezvous(host, port, rank=joined[producer], world_size=1 + consumers[producer])
            sources.append(Source(self._plan, self._config, rendezvous, _present(offer)))
        size = self._ranks_per_engine
        of_engines = [sources[start : start + size] for start in range(0, len(sources), size)]
        wait(self._policy.join_refit(consumers), engines.join_refit(of_engines), timeout_s=self._limit_s)
        self._connected = list(engines.live)

    def _producers_of(self, engines: RemoteGeneration) -> list[int]:
        size = self._ranks_per_engine
        return [rank for engine in engines.live for rank in self._producers[engine * size : (engine + 1) * size]]

    def make_room(self) -> None:
        """Let the policy leave the memory that engines need at their start."""
        self._policy.prepare_for_generation()

    def refit(self, version: int, engines: RemoteGeneration | None = None) -> dict[str, float]:
        """Send the weights of step `version` to these engines (None: all that live), and compare checksums; return
        metrics. The engines must be idle or paused.

        Sleeping engines allocate weights before the transfer. They allocate the KV cache after it, when the policy has
        entered its generation phase.

        Raises:
            RefitError: the checksums of sent and received bytes differ.
            WorkerError: the transfer failed.
        """
        engines = engines or self._generation
        self._connect(engines)
        started, self.version = time.perf_counter(), version
        self._policy.prepare_for_refit(self._engine_bytes)
        engines.wake_weights()
        transfer_started = time.perf_counter()
        results = wait(self._policy.send_weights(), engines.receive_weights(version))
        seconds = time.perf_counter() - transfer_started
        self._policy.prepare_for_generation()
        engines.wake_cache()
        woken = time.perf_counter() - started - seconds

        sent: list[RefitReport | None] = results[: self._policy.ranks]
        received = [report for engine in results[self._policy.ranks :] for report in engine]
        for consumer, (producer, report) in enumerate(zip(self._producers_of(engines), received, strict=True)):
            engine, rank = divmod(consumer, self._ranks_per_engine)
            name = f"rank {rank} of generation rank {engines.live[engine]}"
            compare_checksums(self._plan, _present(sent[producer]), report, name)
        metrics = {
            f"{stage}_s": max(report.seconds.get(stage, 0.0) for report in reports if report is not None)
            for stage, reports in (("iterate", sent), ("pack", sent), ("transfer", sent), ("load", received))
        }
        metrics |= {
            "bytes": float(self._plan.nbytes),
            "buckets": float(len(self._plan.buckets)),
            "seconds": seconds,
            "gb_per_s": self._plan.nbytes / seconds / 1e9,
            "wake_s": woken,
        }
        if checksums := [one for report in sent if report is not None for one in report.checksums]:
            # Floats represent integers below 2^53 exactly.
            metrics["weights_checksum"] = float(sum(checksums) % 2**53)
        if self._config.verify != "off":
            self._start_probe(engines)
        return metrics

    def verify_with_probe(self) -> dict[str, float]:
        """Compare logprobs of the engines' probes after the last refit with the policy's, in its logprob phase. Return
        metrics; empty without a probe.

        Raises:
            EngineError, WorkerError: see `RemoteGeneration.collect_probe`.
            RefitError: logprobs differ; the message names the engine and the difference.
        """
        started = time.perf_counter()
        begun, self._probing = self._probing, {}
        prompt, probed = self._probe.prompt, self._generation.collect_probe(begun)
        if not probed:
            return {}
        sequences = torch.tensor([[*prompt, *completion.tokens.tolist()] for completion in probed.values()])
        lengths = torch.full((len(probed),), sequences.shape[1])
        scored = self._policy.logprobs(sequences, lengths, phase="probe")[:, len(prompt) :]
        sampled = torch.from_numpy(np.stack([completion.logprobs for completion in probed.values()]))
        differences = (scored - sampled).abs().mean(dim=1).tolist()
        for engine, difference in zip(probed, differences, strict=True):
            # Also true for NaN.
            if not difference <= self._probe.tolerance:
                raise RefitError(
                    f"after the refit, the probe's logprobs of generation rank {engine} and of the policy differ by "
                    f"{difference:.4f} nats on average (limit {self._probe.tolerance:g}; refit.verify=off "
                    "skips the probe)"
                )
        return {"probe_logprob_diff": max(differences), "probe_s": time.perf_counter() - started}

    def _start_probe(self, engines: RemoteGeneration) -> None:
        """Make these engines sample a short sequence with its new weights, before other requests. `verify_with_probe`
        compares it later, as the policy's weights may be on the host now."""
        probe = self._probe
        sampling = Sampling(probe.temperature, 1.0, None, probe.tokens, stop_token_ids=(), stop_strings=())
        self._probing |= engines.start_probe(Request(tuple(probe.prompt), sampling, seed=1))


def producers(policy_ranks: int, consumers: int, shared_device: bool) -> list[int]:
    """Return each engine rank's policy rank that sends to it: the one on its device, or rank 0."""
    return [consumer % policy_ranks if shared_device else 0 for consumer in range(consumers)]


def _present[Result](given: Result | None) -> Result:
    if given is None:
        raise RuntimeError("a policy rank with consumers has sent nothing")
    return given
