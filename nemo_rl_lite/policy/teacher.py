"""Teachers on one rank: models of one parallel layout that compute logprobs of the policy's samples.

`cluster/` hosts it in a separate actor, because a process has one parallel layout.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl_lite.config.schema import ClusterConfig, PolicyConfig
from nemo_rl_lite.losses.batch import Batch, TokenRow, TokenRows
from nemo_rl_lite.observability.memory import MemoryMeter, Peaks
from nemo_rl_lite.observability.timer import SETUP
from nemo_rl_lite.offload.host_memory import HostArena
from nemo_rl_lite.offload.mover import FrozenWeights, Move
from nemo_rl_lite.offload.residency import Component, Phase, Place, Residency
from nemo_rl_lite.policy.groups import beat, leave_groups
from nemo_rl_lite.policy.interface import ParallelPlace, TeacherScores, with_scores
from nemo_rl_lite.policy.logprobs import TopLogits
from nemo_rl_lite.policy.memory import CPUMemory, GPUMemory, host_registrar
from nemo_rl_lite.policy.micro_batches import Layout
from nemo_rl_lite.policy.model import MegatronModel, build_model
from nemo_rl_lite.policy.passes import forward_scores
from nemo_rl_lite.policy.worker import preload
from nemo_rl_lite.system import numa

__all__ = ["TeacherWorker", "beat", "preload"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Teacher:
    model: MegatronModel
    layout: Layout
    weights: FrozenWeights


class TeacherWorker:
    """Teachers on this rank, numbered from 0. The environment has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Methods are collective, except for `scores`. Results are None on ranks that do not report (`ParallelPlace.reports`).
    """

    def __init__(
        self,
        policies: Sequence[PolicyConfig],
        cluster: ClusterConfig,
        seed: int,
        temperature: float,
        topk: int | None,
        threads: int,
        on_gpu: bool,
        residency: Residency,
    ):
        """`policies`: those of `as_teacher`, whose `model_name` is a folder. `topk`: number of largest logits that
        `score` returns."""
        if on_gpu and cluster.numa_binding:
            log.info("%s", numa.bind(numa.gpu_address()).describe())
        torch.set_num_threads(threads)
        self._temperature, self._topk = temperature, topk
        self._stays = residency.place(Phase.TRAIN, Component.TEACHER_WEIGHTS) is Place.DEVICE
        self._device = GPUMemory() if on_gpu else CPUMemory()
        self._scored: dict[int, TokenRows] = {}
        self._teachers: list[_Teacher] = []
        self._memory = MemoryMeter(
            lambda: {Component.TEACHER_WEIGHTS.value: sum(one.weights.device_bytes() for one in self._teachers)}
        )
        for policy in policies:
            with SETUP("model"):
                model = build_model(policy, policy.model_name, on_gpu, cluster.collective_timeout_s, seed, trains=False)
            layout = Layout.configured(policy, "logprob", on_gpu, can_share=model.place.shares_prompts)
            log.info("micro-batches: %s", layout)
            arena = HostArena("the teacher's weights", host_registrar(policy, model))
            weights = FrozenWeights("teacher_weights", model.state, arena, model.device)
            self._teachers.append(_Teacher(model, layout, weights))
            # Frees the device for the next teacher.
            self.leave()

    def place(self) -> ParallelPlace:
        return self._teachers[0].model.place

    def prepare_for_logprob(self, teacher: int) -> None:
        """Load a teacher's weights to the device, for the logprob phase."""
        self._teachers[teacher].weights.reload()

    def leave(self) -> None:
        """Free memory for other processes, after the logprob phase."""
        for one in () if self._stays else self._teachers:
            one.weights.offload()
        self._device.trim()

    def score(self, rows: Sequence[TokenRow], teacher: int) -> TeacherScores | None:
        """Return a teacher's logprobs of this replica's rows at the sampling temperature and, with `topk`, each token's
        largest logits."""
        batch, own = Batch.padded(rows), self._teachers[teacher]
        asked = None if self._topk is None else TopLogits(self._topk)
        with self._memory.phase("logprob"):
            inputs = batch.tokens, batch.lengths
            scored = forward_scores(own.model, *inputs, own.layout, self._temperature, loss=asked)
        if scored is None or not own.model.place.reports:
            return None
        inside_BT = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        found = {name: values[inside_BT].numpy() for name, values in scored.items()}
        ids = found.get("topk_ids")
        return TeacherScores(found["logprobs"], found.get("topk_logits"), None if ids is None else ids.astype(np.int32))

    def score_parts(self, teacher: int, order: Sequence[int], *parts: TokenRows) -> None:
        """Compute a teacher's logprobs of the rows at `order` in the concatenation of `parts`, and keep them for
        `scores`."""
        rows = TokenRows.concatenated(parts).select(order)
        found = self.score(rows, teacher)
        if found is not None:
            self._scored[teacher] = with_scores(rows, [np.arange(len(rows))], [found])

    def scores(self, teacher: int, rows: Sequence[int]) -> TeacherScores:
        """Return the teacher's scores of these rows of `score_parts`. Not collective: the rank reports."""
        found = self._scored[teacher].select(rows)
        logprobs, logits, ids = found.teacher_logprobs, found.teacher_topk_logits, found.teacher_topk_ids
        return TeacherScores(logprobs, logits, ids)  # pyrefly: ignore

    def close(self) -> None:
        """Drop the models, so that this process can build another worker."""
        self.__dict__.clear()
        leave_groups()

    def pop_memory(self) -> Peaks:
        """Return peak memory by phase since the last call; empty on a CPU."""
        return self._memory.take()

    def pop_moves(self) -> list[tuple[str, Move]]:
        """Return moves between device and host since the last call."""
        return [move for one in self._teachers for move in one.weights.pop_moves()]
