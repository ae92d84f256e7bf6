"""Refits the engines with the policy's weights: connects once, then sends new weights on request."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from nemo_rl_lite.refit.windows import Transfer, WindowRoutes, sent_to
from nemo_rl_lite.workers.generation import RemoteGeneration
from nemo_rl_lite.workers.policy import RemotePolicy

log = logging.getLogger(__name__)

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
        eight_bit_cache = str(generation.vllm_kwargs.get("kv_cache_dtype")).startswith("fp8")
        if engines_quantize(generation) or eight_bit_cache or config.policy.megatron_cfg.fp8_cfg.enabled:
            tolerance = PROBE_TOLERANCE_QUANTIZED
        return cls(list(prompt), min(PROBE_TOKENS, generation.max_new_tokens), generation.temperature, tolerance)


class WeightSync:
    """Sends weights from the policy to every engine, checked on both sides.

    Colocated engine ranks receive from the policy rank on their device. Otherwise policy rank 0 sends to all at first.
    If the policy or an engine has several ranks, later each policy rank sends windows to the ranks that need them.
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
        # False if policy and engines have one rank each, for which windows are whole tensors.
        self._has_windows = not self._shared_device and (policy.ranks > 1 or self._ranks_per_engine > 1)
        # Bytes that an engine takes when its weights wake up.
        self._engine_bytes = 0
        if self._shared_device:
            own = self._plan.nbytes // self._ranks_per_engine
            self._engine_bytes = generation.weight_bytes() if adapters_alone else own
        self._connected: Sequence[int] = []
        # Of windows, after the first refit of a connection; receivers are numbered in the order of the engines.
        self._transfers: Sequence[Transfer] = []
        self._connect(generation)
        self.shares_weights = engines_share_weights(config)
        """True if policy ranks use weights in the engines' memory."""
        if self.shares_weights:
            engine_of = dict(zip(self._producers, generation.share_weights(), strict=True))
            policy.use_shared_weights([engine_of.get(rank) for rank in range(policy.ranks)])

    def disconnect(self) -> None:
        """Connect again at the next refit, because engines are new or have closed their connection."""
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
        joining = engines.join_refit(self._by_engine(sources))
        wait(self._policy.join_refit(consumers), joining, timeout_s=self._limit_s)
        self._connected, self._address, self._transfers = engines.live, opened[0][:2], []

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
        # The same engines throughout, also if one is lost meanwhile.
        engines = engines or self._generation.only(self._generation.live)
        self._connect(engines)
        clock, self.version, transfers = time.perf_counter(), version, self._transfers
        self._policy.prepare_for_refit(self._engine_bytes)
        engines.wake_weights()
        started = time.perf_counter()
        sent, received = self._split(wait(self._policy.send_weights(), engines.receive_weights(version)))
        seconds, woken = time.perf_counter() - started, started - clock
        self._compare(engines, sent, received)
        # An engine that is refitted alone is connected again with the others.
        starts = self._has_windows and not transfers and engines.live == self._generation.live
        summed = self._start_windows(engines) if starts else None
        clock = time.perf_counter()
        self._policy.prepare_for_generation()
        engines.wake_cache()
        woken += time.perf_counter() - clock

        metrics = {
            f"{stage}_s": max(report.seconds.get(stage, 0.0) for report in reports if report is not None)
            for stage, reports in (("iterate", sent), ("pack", sent), ("transfer", sent), ("load", received))
        }
        # An engine rank receives a part with windows, and with direct copies.
        nbytes = max(report.nbytes for report in received)
        metrics |= {
            "bytes": float(nbytes),
            "buckets": float(len(transfers or self._plan.buckets)),
            "seconds": seconds,
            "gb_per_s": nbytes / seconds / 1e9,
            "wake_s": woken,
        }
        # Of windows, if there are any, so that a refit after a new connection has the same.
        if checksums := [one for report in summed or sent if report is not None for one in report.checksums]:
            # Floats represent integers below 2^53 exactly.
            metrics["weights_checksum"] = float(sum(checksums) % 2**53)
        if self._config.verify != "off":
            self._start_probe(engines)
        return metrics

    def _by_engine[Item](self, of_ranks: Sequence[Item]) -> list[Sequence[Item]]:
        size = self._ranks_per_engine
        return [of_ranks[start : start + size] for start in range(0, len(of_ranks), size)]

    def _split(self, results: Sequence[Any]) -> tuple[list[RefitReport | None], list[RefitReport]]:
        """Return the reports of policy ranks, and those of all engines' ranks."""
        ranks = self._policy.ranks
        return list(results[:ranks]), [report for engine in results[ranks:] for report in engine]

    def _compare(
        self, engines: RemoteGeneration, sent: Sequence[RefitReport | None], received: Sequence[RefitReport]
    ) -> None:
        """Raise RefitError if an engine rank's checksums are not those of its senders."""
        for consumer, (producer, report) in enumerate(zip(self._producers_of(engines), received, strict=True)):
            if self._transfers:
                plan, ours = sent_to(consumer, self._transfers, sent)
            else:
                plan, ours = self._plan, _present(sent[producer])
            engine, rank = divmod(consumer, self._ranks_per_engine)
            compare_checksums(plan, ours, report, f"rank {rank} of generation rank {engines.live[engine]}")

    def _start_windows(self, engines: RemoteGeneration) -> Sequence[RefitReport | None] | None:
        """Let later refits send windows, if the engines' loaders only copy. Returns the senders' reports of a first
        transfer, which compares the windows with the engines' weights, or None."""
        recipe = self._policy.refit_recipe()
        needed = engines.needed_pieces(recipe) if recipe is not None else [None]
        needs = {rank: pieces for rank, pieces in enumerate(needed) if pieces is not None}
        if len(needs) < len(needed):
            log.info("every refit goes through policy rank 0: an export or a loader does more than copy")
            self._has_windows = False
            return None
        count, size = len(engines.live), self._ranks_per_engine
        transfers = [one.shifted(size, count) for one in self._policy.route_windows(needs)]
        routes = partial(WindowRoutes, address=self._address, config=self._config)
        of_policy = [
            routes([one for one in transfers if one.sender == rank], None) for rank in range(self._policy.ranks)
        ]
        of_ranks = [routes([one for one in transfers if rank in one.receivers], rank) for rank in range(count * size)]
        sending = self._policy.join_windows(of_policy)
        receiving = engines.join_windows(self._by_engine(of_ranks))
        sent, differing = self._split(wait(sending, receiving, timeout_s=self._limit_s))
        if any(differing):
            name = next(filter(None, differing))
            log.warning("every refit goes through policy rank 0: windows of %s differ from the engine's weights", name)
            self._has_windows = False
            self.disconnect()
            return None
        self._transfers = transfers
        return sent

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
        """Make these engines sample a short sequence with the new weights, before other requests. `verify_with_probe`
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
