"""One policy rank: logprobs, training steps, weights for a refit. A plain class; `cluster/` runs it in an actor."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from nemo_rl_lite.algorithms.losses import Batch, GRPOLoss, Normalizers, combine_metrics
from nemo_rl_lite.checkpoint.export import write_hf_folder
from nemo_rl_lite.config.schema import ClusterConfig, PolicyConfig, RefitConfig
from nemo_rl_lite.offload.optimizer_states import Move, move_optimizer_states
from nemo_rl_lite.policy.megatron.batches import forward_backward, forward_logprobs
from nemo_rl_lite.policy.megatron.model import ParallelPlace, build_model
from nemo_rl_lite.policy.megatron.optimizer import build_optimizer
from nemo_rl_lite.policy.megatron.reference import ReferenceWeights
from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.broadcast import RefitReport, send
from nemo_rl_lite.refit.packing import dtype_name
from nemo_rl_lite.refit.plan import RefitPlan, bucket_size, make_plan

log = logging.getLogger(__name__)


class MegatronWorker:
    """The policy on this rank. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in the environment.

    Every method is collective: all ranks call it. Results are None on ranks that do not report
    (`ParallelPlace.reports`) and hold no torch tensors: megatron-core changes how those are pickled, so that
    whoever reads them must import it.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        cluster: ClusterConfig,
        refit: RefitConfig,
        model_path: str,
        seed: int,
        temperature: float,
        keep_reference: bool,
        threads: int,
    ):
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._policy, self._refit, self._temperature = policy, refit, temperature
        self._model_path = Path(model_path)
        self._rank = int(os.environ["RANK"])
        self._device = "cpu"
        self._model = build_model(policy, model_path, cluster.collective_timeout_s, seed)
        self._optimizer, self._scheduler = build_optimizer(policy, self._model)
        self._reference = ReferenceWeights(self._model) if keep_reference else None
        self._conversion_tasks: list[Any] | None = None
        self._plan: RefitPlan | None = None
        self._store: Any = None
        self._group: refit_group.RefitGroup | None = None

    def place(self) -> ParallelPlace:
        return self._model.place

    def prepare_for_logprob(self) -> Move | None:
        """Enter the logprob phase: optimizer states leave the device where the configuration asks for it."""
        return self._move_optimizer("cpu") if self._policy.offload_optimizer_states_for_logprob else None

    def prepare_for_training(self) -> Move:
        """Enter the training phase: everything training needs is on the device, wherever it was."""
        return self._move_optimizer(self._device)

    def logprobs(self, tokens_BT: Tensor) -> np.ndarray | None:
        """Logprobs [B, T] of the tokens at the sampling temperature; entry t belongs to token t, entry 0 is 0."""
        logprobs_BT = forward_logprobs(self._model, tokens_BT, self._policy.logprob_batch_size, self._temperature)
        return logprobs_BT.cpu().numpy() if self._model.place.reports and logprobs_BT is not None else None

    def reference_logprobs(self, tokens_BT: Tensor) -> np.ndarray | None:
        """The same under the starting weights."""
        if self._reference is None:
            raise RuntimeError("no reference weights were kept: the KL penalty was 0 at the start")
        with self._reference.in_place():
            return self.logprobs(tokens_BT)

    def train(self, batch: Batch, loss: GRPOLoss, counts: Normalizers) -> dict[str, float] | None:
        """One optimizer step on this rank's share of a global batch; metrics are this replica's share, beside
        `grad_norm`, `lr` and `wd`, which are whole on every replica.

        Raises:
            RuntimeError: the gradient is not finite (found by megatron-core before the weights change).
        """
        for chunk in self._model.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts = forward_backward(
            self._model,
            batch,
            self._policy.train_micro_batch_size,
            self._temperature,
            lambda logprobs_BT, micro: loss(logprobs_BT, micro, counts),
        )
        learning_rate = self._optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self._optimizer.step()
        self._scheduler.step(increment=1)
        if not self._model.place.reports:
            return None
        whole = {"grad_norm": grad_norm, "lr": learning_rate, "wd": self._policy.megatron_cfg.optimizer.weight_decay}
        shares = combine_metrics([{name: value.item() for name, value in part.items()} for part in parts])
        return shares | {name: float(value) for name, value in whole.items()}

    def plan_refit(self) -> RefitPlan | None:
        """Lay the exported weights into buckets, once; rank 0 returns the plan."""
        weights = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in self._export()]
        if self._rank:
            return None
        memory = psutil.virtual_memory().total
        size = bucket_size(memory, self._refit.buffer_memory_ratio, self._refit.bucket_bytes)
        self._plan = make_plan(weights, size)
        return self._plan

    def open_refit(self, host: str) -> int | None:
        """Open the refit's meeting point on rank 0; returns its port."""
        if self._rank:
            return None
        self._store = refit_group.host_store(host, self._refit.timeout_s)
        return self._store.port

    def join_refit(self, world_size: int) -> None:
        """Join the refit group as its producer; returns when every consumer has joined."""
        if self._rank == 0:
            self._group = refit_group.join(self._store, 0, world_size, self._refit.timeout_s)

    def send_weights(self) -> RefitReport | None:
        """Send the current weights to every consumer (rank 0); other ranks take part in the export."""
        if self._rank:
            for _ in self._export():
                pass
            return None
        if self._plan is None or self._group is None:
            raise RuntimeError("send_weights needs plan_refit, open_refit and join_refit first")
        return send(self._plan, self._export(), self._group, verify=self._refit.verify != "off")

    def export_hf(self, path: str) -> None:
        """Write the model with its configuration and tokenizer in Hugging Face format to the folder `path`."""
        weights = list(self._export())
        if self._rank == 0:
            write_hf_folder(weights, self._model_path, Path(path))

    def _export(self) -> Any:
        bridge, chunks = self._model.bridge, self._model.chunks
        if self._conversion_tasks is None:
            self._conversion_tasks = bridge.get_conversion_tasks(chunks)
        return bridge.export_hf_weights(
            chunks, cpu=self._device == "cpu", show_progress=False, conversion_tasks=self._conversion_tasks
        )

    def _move_optimizer(self, device: str) -> Move:
        move = move_optimizer_states(_torch_optimizers(self._optimizer), device)
        log.info("optimizer states to %s: %d bytes moved in %.3f s", device, move.nbytes, move.seconds)
        return move


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside a megatron-core optimizer, chained or not."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]
