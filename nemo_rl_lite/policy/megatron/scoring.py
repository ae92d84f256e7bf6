"""Logprobs and losses of one policy rank's rows, without a gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import Loss, Normalizers, floats, loss_of
from nemo_rl_lite.losses.mismatch import mismatch_metrics
from nemo_rl_lite.observability.memory import MemoryMeter
from nemo_rl_lite.offload.phases import PhaseMemory
from nemo_rl_lite.offload.residency import Phase
from nemo_rl_lite.policy.megatron.batches import forward_scores
from nemo_rl_lite.policy.megatron.memory import require_weights
from nemo_rl_lite.policy.megatron.micro_batches import Layout
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.policy.megatron.reference import Reference


@dataclass(frozen=True)
class Scoring:
    """The policy and, where a loss compares with it, the reference policy. Every method is collective."""

    model: MegatronModel
    reference: Reference | None
    layout: Layout
    temperature: float
    phases: PhaseMemory
    memory: MemoryMeter

    def score(
        self, batch: Batch, which: Sequence[str], counts: Normalizers, first: int
    ) -> tuple[Batch, dict[str, float] | None]:
        """See `MegatronWorker.score`; returns the batch with its logprobs, too."""
        measured = {}
        if "previous" in which:
            later, previous_BT = batch.rows(slice(first, None)), torch.zeros(batch.tokens.shape)
            scored_BT = self._logprobs(later, then_train="reference" not in which)
            if scored_BT is not None:
                previous_BT[first:] = scored_BT
                batch = replace(batch, previous_logprobs=previous_BT)
                if batch.generation_logprobs is not None:
                    measured = mismatch_metrics(batch.rows(slice(first, None)), counts)
        if "reference" in which:
            if self.reference is None:
                raise RuntimeError("the worker was started without reference weights (keep_reference)")
            require_weights(self.model, self.phases)
            with self.reference.in_place():
                batch = replace(batch, reference_logprobs=self._logprobs(batch, then_train=True))
        return batch, floats([measured])[0] if self.model.place.reports else None

    def evaluate(self, batch: Batch, rows: int, loss: Loss, counts: Normalizers) -> dict[str, float] | None:
        """See `MegatronWorker.evaluate`."""
        scored = self.scores(batch.tokens, batch.lengths, then_train=self.reference is None, loss=loss)
        if scored is None or not rows or not self.model.place.reports:
            return None
        logprobs_BT = scored.pop("logprobs")
        with torch.no_grad():
            _, metrics = loss_of(loss, logprobs_BT[:rows], replace(batch, **scored).rows(slice(rows)), counts)
        return floats([metrics])[0]

    def scores(
        self,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        phase: str = "logprob",
        then_train: bool = False,
        loss: Loss | None = None,
        experts_BTLk: Tensor | None = None,
    ) -> dict[str, Tensor] | None:
        """See `forward_scores`. `then_train`: training follows, so what it needs may move to the device meanwhile."""
        require_weights(self.model, self.phases)
        working_bytes = self.memory.working_bytes(phase) if then_train else None
        between = self.phases.between_micro_batches(Phase.TRAIN, working_bytes, self.memory.moving)
        with self.memory.phase(phase):
            return forward_scores(
                self.model,
                tokens_BT,
                lengths_B,
                self.layout,
                self.temperature,
                between,
                loss,
                experts_BTLk=experts_BTLk,
            )

    def _logprobs(self, batch: Batch, then_train: bool) -> Tensor | None:
        scored = self.scores(batch.tokens, batch.lengths, then_train=then_train, experts_BTLk=batch.routed_experts)
        self.model.clock.keep("logprob")
        return None if scored is None else scored["logprobs"]
