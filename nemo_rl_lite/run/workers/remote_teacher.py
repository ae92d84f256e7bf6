"""The teacher in Ray actors: it scores the rows of a rollout, each in one of its data-parallel replicas."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.losses.batch import TokenRows
from nemo_rl_lite.models.shape import described_shape
from nemo_rl_lite.offload.mover import Move
from nemo_rl_lite.planning.memory import forward_flops
from nemo_rl_lite.policy.balance import even_shares
from nemo_rl_lite.policy.megatron.shares import Cost
from nemo_rl_lite.policy.megatron.teacher import TeacherScores
from nemo_rl_lite.run.workers.replicas import Replicas, combine_moves

# What is logged of a teacher's measurements, under which name: the other names are those of the policy's process.
MEMORY = {
    "measured/logprob/teacher_weights": "measured/logprob/teacher_weights",
    "policy_peak_bytes/logprob": "teacher_peak_bytes/logprob",
}


class RemoteTeacher:
    """`Teacher` over a group of started `TeacherWorker`s."""

    def __init__(self, group: WorkerGroup, cost: Cost = float):
        """`cost`: the work of a sequence by its number of tokens."""
        self.group, self._cost = group, cost
        self._replicas = Replicas(group)

    @classmethod
    def of(cls, config: Config, group: WorkerGroup) -> "RemoteTeacher":
        """The teacher of a run, whose `teacher.model_name` is a folder."""
        shape = described_shape(Path(str(config.teacher.model_name)))
        return cls(group) if shape is None else cls(group, lambda tokens: forward_flops(shape, tokens))

    def scored(self, rows: TokenRows) -> TokenRows:
        """See `Teacher.scored`. Copies of the last row fill up the replicas, and are left out of the result."""
        count, lengths, replicas, phase = len(rows), rows.lengths, self._replicas.count, "teacher logprobs"
        index = np.arange(-(-count // replicas) * replicas).clip(max=count - 1)
        shares = even_shares([self._cost(int(lengths[row])) for row in index], replicas)
        wait(self.group.call("prepare_for_logprob", phase=phase))
        scores = self._replicas.call("score", [(rows.select(index[share].tolist()),) for share in shares], phase=phase)
        wait(self.group.call("leave", phase=phase))
        return with_scores(rows, [index[share] for share in shares], scores)

    def take_memory(self) -> dict[str, float]:
        ranks = wait(self.group.call("take_memory"))
        there = {kept for kept in MEMORY if any(kept in peaks for peaks in ranks)}
        return {MEMORY[kept]: max(peaks.get(kept, 0.0) for peaks in ranks) for kept in sorted(there)}

    def take_moves(self) -> dict[str, Move]:
        return combine_moves(wait(self.group.call("take_moves")))


def with_scores(rows: TokenRows, shares: Sequence[np.ndarray], scores: Sequence[TeacherScores]) -> TokenRows:
    """The rows with the scores of shares of them, by the indices of each share's rows; some may be in several."""
    starts = rows.ends - rows.lengths
    places = np.concatenate([np.arange(starts[row], rows.ends[row]) for own in shares for row in own])

    def laid_out(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
        there = [part for part in parts if part is not None]
        if not there:
            return None
        joined = np.concatenate(there)
        whole = np.empty((len(rows.tokens), *joined.shape[1:]), joined.dtype)
        whole[places] = joined
        return whole

    return replace(
        rows,
        teacher_logprobs=laid_out([one.logprobs for one in scores]),
        teacher_topk_logits=laid_out([one.topk_logits for one in scores]),
        teacher_topk_ids=laid_out([one.topk_ids for one in scores]),
    )
