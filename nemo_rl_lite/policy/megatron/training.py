"""Optimizer steps of one policy rank."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import Loss, Normalizers, combine_metrics, floats
from nemo_rl_lite.observability.liveness import note_progress
from nemo_rl_lite.observability.memory import MemoryMeter
from nemo_rl_lite.offload.phases import PhaseMemory
from nemo_rl_lite.offload.residency import Component
from nemo_rl_lite.policy.megatron.batches import forward_backward
from nemo_rl_lite.policy.megatron.graphs import MicroBatchGraphs
from nemo_rl_lite.policy.megatron.micro_batches import Layout
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.policy.megatron.optimizer import gradients_are_finite
from nemo_rl_lite.policy.megatron.routers import expert_biases


@dataclass(frozen=True)
class Training:
    """The model with its optimizer and schedule. `graphs` run micro-batches where there are any; `seed` is the
    run's."""

    model: MegatronModel
    optimizer: Any
    scheduler: Any
    layout: Layout
    graphs: MicroBatchGraphs | None
    temperature: float
    weight_decay: float
    seed: int
    phases: PhaseMemory
    memory: MemoryMeter

    def step(
        self, batch: Batch, loss: Loss, counts: Normalizers, mismatch_counts: Normalizers | None
    ) -> tuple[dict[str, float], dict[str, float]] | None:
        """See `MegatronWorker.train`; the batch has the rows of this step alone. Collective."""
        self.phases.require(Component.PARAMETERS)
        self.phases.expect(Component.OPTIMIZER_STATES)
        self._seed_step()
        with self.memory.phase("train"), self.phases.gradients.accumulating():
            for chunk in self.model.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            biases = expert_biases(self.model.chunks)
            before = [bias.clone() for bias in biases]
            parts = forward_backward(
                self.model, batch, self.layout, self.temperature, loss, counts, mismatch_counts, self.graphs
            )
            self.model.clock.keep("train")
            self.phases.arrive(Component.OPTIMIZER_STATES)
            self.model.gather.fall_behind()
            learning_rate = self.optimizer.param_groups[0]["lr"]
            finite, grad_norm = gradients_are_finite(self.model), math.nan
            if finite:
                _, grad_norm, _ = self.optimizer.step()
                self.scheduler.step(increment=1)
            else:
                # megatron-core has moved them already, with the gradients.
                for bias, value in zip(biases, before, strict=True):
                    bias.copy_(value)
            self.phases.recount()
        if not self.model.place.reports:
            return None
        measured = [{"grad_norm": torch.as_tensor(grad_norm)}, *(part.metrics for part in parts)]
        norm, *each = floats([*measured, *(part.mismatch for part in parts)])
        shares, mismatch = combine_metrics(each[: len(parts)]), combine_metrics(each[len(parts) :])
        own = {"lr": learning_rate, "wd": self.weight_decay, "skipped_steps": float(not finite)}
        return shares | norm | own, mismatch

    def _seed_step(self) -> None:
        """Seed the random numbers of a step, such as dropout's, from run, step and place alone. Context-parallel ranks
        have other tokens of the replica's sequences."""
        steps, context = self.scheduler.num_steps, self.model.context
        replica = self.model.place.data_rank * context.size + context.rank
        note_progress(optimizer_step=steps + 1, micro_batch=0)
        torch.manual_seed((self.seed * 1_000_003 + steps) * 65_537 + replica)
