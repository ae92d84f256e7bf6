"""The policy in Ray actors: splits batches over data-parallel ranks and puts results together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.cluster.workers import Call, WorkerGroup, wait
from nemo_rl_lite.config.schema import RefitConfig
from nemo_rl_lite.errors import CheckpointError, WorkerError
from nemo_rl_lite.losses.policy_gradient import Batch, Loss, combine_metrics
from nemo_rl_lite.offload.mover import Move
from nemo_rl_lite.policy.megatron.model import ParallelPlace
from nemo_rl_lite.refit.layout.plan import RefitPlan
from nemo_rl_lite.refit.transport.interface import Offer

WORKER_CLASS = "nemo_rl_lite.policy.megatron.worker.MegatronWorker"
# The same on every replica: not to be summed over them.
WHOLE_METRICS = ("grad_norm", "lr", "wd", "skipped_steps")


class RemotePolicy:
    """`Policy` over a group of started `MegatronWorker`s."""

    def __init__(self, group: WorkerGroup, global_batch: int):
        """`global_batch`: sequences of an optimizer step."""
        self.group, self._global_batch = group, global_batch
        self._places: list[ParallelPlace] = wait(group.call("place"))
        self._replicas = self._places[0].data_size

    def prepare_for_logprob(self) -> None:
        wait(self.group.call("prepare_for_logprob"))

    def logprobs(self, tokens_BT: Tensor, lengths_B: Tensor, phase: str = "logprob") -> Tensor:
        return self._score("logprobs", tokens_BT, lengths_B, phase)

    def reference_logprobs(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
        return self._score("reference_logprobs", tokens_BT, lengths_B)

    def prepare_for_training(self) -> None:
        wait(self.group.call("prepare_for_training"))

    def prepare_for_refit(self, engine_bytes: int) -> None:
        """Enter the refit phase; what leaves the device may still be leaving while engines on the same devices take
        `engine_bytes` of each for their weights."""
        wait(self.group.call("prepare_for_refit", engine_bytes))

    def prepare_for_generation(self) -> None:
        """Enter the generation phase."""
        wait(self.group.call("prepare_for_generation"))

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]:
        steps = []
        for start in range(0, batch["tokens"].shape[0], self._global_batch):
            part = {name: values[start : start + self._global_batch] for name, values in batch.items()}
            replicas = self._step(part, loss, loss.counts(part))
            combined = combine_metrics(replicas)
            steps.append(combined | {name: replicas[0][name] for name in WHOLE_METRICS})
        totals = combine_metrics(steps)
        extremes = ("_min", "_max")
        return {name: value / (1 if name.endswith(extremes) else len(steps)) for name, value in totals.items()}

    def begin_save(self, folder: str) -> None:
        self._checkpoint("begin_save", folder)

    def save_is_written(self) -> bool:
        return all(wait(self.group.call("save_is_written", phase="checkpoint")))

    def finish_save(self) -> None:
        self._checkpoint("finish_save")

    def load(self, folder: str) -> None:
        self._checkpoint("load", folder)

    def export_hf(self, path: str) -> None:
        wait(self.group.call("export_hf", path))

    def take_memory(self) -> dict[str, float]:
        ranks = wait(self.group.call("take_memory"))
        names = sorted({name for peaks in ranks for name in peaks})
        return {name: max(peaks.get(name, 0.0) for peaks in ranks) for name in names}

    def release_host_memory(self) -> None:
        """Give back the host memory that moves between phases have kept, at the end of a run."""
        wait(self.group.call("release_host_memory"))

    def take_moves(self) -> dict[str, Move]:
        return combine_moves(wait(self.group.call("take_moves")))

    @property
    def ranks(self) -> int:
        return len(self.group)

    def plan_refit(
        self, config: RefitConfig, shared_device: bool, consumers: Sequence[int], timeout_s: float
    ) -> RefitPlan:
        """See `MegatronWorker.plan_refit`; `consumers` has a number for each rank."""
        arguments = [(config, shared_device, count) for count in consumers]
        return wait(self.group.call_each("plan_refit", arguments), timeout_s=timeout_s)[0]

    def open_refit(self, timeout_s: float) -> list[tuple[str, int, Offer | None]]:
        """Each rank's meeting point, as host and port, and its offer."""
        hosts = [host for host, _ in self.group.addresses(timeout_s)]
        opened = wait(self.group.call_each("open_refit", [(host,) for host in hosts]), timeout_s=timeout_s)
        return [(host, *own) for host, own in zip(hosts, opened, strict=True)]

    def join_refit(self) -> Call:
        """See `MegatronWorker.join_refit`; ends when consumers have joined, too."""
        return self.group.call("join_refit")

    def send_weights(self) -> Call:
        """See `MegatronWorker.send_weights`; ends when consumers have received, too."""
        return self.group.call("send_weights", phase="refit")

    def _checkpoint(self, method: str, *arguments: str) -> None:
        try:
            wait(self.group.call(method, *arguments, phase="checkpoint"))
        except WorkerError as error:
            # Where some ranks go on, in a collective that will not end, they are no longer in step.
            if error.raised == CheckpointError.__name__ and not error.others_go_on:
                raise CheckpointError(error.cause.removeprefix(f"{error.raised}: ")) from error
            raise

    def _score(self, method: str, tokens_BT: Tensor, lengths_B: Tensor, *more: str) -> Tensor:
        """Any number of rows: copies of the last fill up the replicas and are left out of the result."""
        rows = tokens_BT.shape[0]
        index = torch.arange(-(-rows // self._replicas) * self._replicas).clamp(max=rows - 1)
        shards = list(zip(tokens_BT[index].chunk(self._replicas), lengths_B[index].chunk(self._replicas), strict=True))
        call = self.group.call_each(method, [(*shards[place.data_rank], *more) for place in self._places])
        return torch.from_numpy(np.concatenate(self._reported(wait(call)))[:rows])

    def _step(self, batch: Batch, *arguments: object) -> list[dict[str, float]]:
        rows = batch["tokens"].shape[0] // self._replicas
        shards = [
            {name: values[replica * rows : (replica + 1) * rows] for name, values in batch.items()}
            for replica in range(self._replicas)
        ]
        call = self.group.call_each("train", [(shards[place.data_rank], *arguments) for place in self._places])
        return self._reported(wait(call))

    def _reported(self, results: list[Any]) -> list[Any]:
        """Of all ranks' results, those that stand for a data-parallel replica, in the replicas' order."""
        reporting = {p.data_rank: result for p, result in zip(self._places, results, strict=True) if p.reports}
        return [reporting[replica] for replica in range(self._replicas)]


def combine_moves(ranks: Sequence[Sequence[tuple[str, Move]]]) -> dict[str, Move]:
    """Moves by name, those of the slowest rank: ranks move at the same time, a rank's moves of one name come one after
    the other. What is waited for is the most that any rank waited."""
    combined: dict[str, Move] = {}
    for name in sorted({name for moves in ranks for name, _ in moves}):
        of_ranks = [_in_turn([move for own, move in moves if own == name]) for moves in ranks]
        slowest = max(of_ranks, key=lambda move: move.transfer_s)
        combined[name] = replace(slowest, exposed_s=max(move.exposed_s for move in of_ranks))
    return combined


def _in_turn(moves: Sequence[Move]) -> Move:
    return Move(
        sum(move.nbytes for move in moves),
        sum(move.transfer_s for move in moves),
        sum(move.exposed_s for move in moves),
    )
