"""The policy's side of a refit on one rank: what it exports, in which buckets, and to whom."""

from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch import Tensor

from nemo_rl_lite.config.schema import RefitConfig
from nemo_rl_lite.policy.megatron.export_views import ExportViews
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit import ipc
from nemo_rl_lite.refit.broadcast import BroadcastSender
from nemo_rl_lite.refit.packing import dtype_name
from nemo_rl_lite.refit.plan import RefitPlan, bucket_size, make_plan
from nemo_rl_lite.refit.report import Named, RefitReport


class Producer:
    """`plan`, `open` and `join` once, in this order, then `send` as often as there are new weights. Every method is
    collective: all ranks of the policy call it.

    `views`: the weights as views of parameters, where `plan` has found them to be; `sender`: that to this rank's
    consumers, where it has any.
    """

    def __init__(self, model: MegatronModel):
        self._model = model
        self._conversion_tasks: list[Any] | None = None
        self._config: RefitConfig | None = None
        self._plan: RefitPlan | None = None
        self.views: list[Named] | None = None
        self._store: Any = None
        self._staging: tuple[Tensor, ipc.StagingHandle] | None = None
        self.sender: BroadcastSender | ipc.IpcSender | None = None

    def plan(self, config: RefitConfig) -> RefitPlan:
        """Lay the exported weights into buckets; the same plan on every rank."""
        self._config = config
        views = ExportViews(self._model.parameters(), self._tasks()) if self._as_it_is else None
        weights = []
        for name, tensor in self.export():
            weights.append((name, tuple(tensor.shape), dtype_name(tensor.dtype)))
            if views is not None:
                views.show(name, tensor)
        self.views = views.take() if views is not None else None
        memory = psutil.virtual_memory().total
        if self._model.device.type == "cuda":
            # What the search for views took is the engine's, on a device that both use.
            torch.cuda.empty_cache()
            memory = torch.cuda.mem_get_info()[1]
        size = bucket_size(memory, config.buffer_memory_ratio, config.bucket_bytes)
        self._plan = make_plan(weights, size)
        return self._plan

    def open(self, host: str, shared_device: bool) -> tuple[int, ipc.StagingHandle | None]:
        """Open this rank's meeting point; its port, and for consumers on the same device the handle of the buffer that
        weights will lie in."""
        if self._plan is None or self._config is None:
            raise RuntimeError("open needs plan first")
        # Those of a connection before, if there was one, make room first.
        self.sender = self._staging = None
        self._store = refit_group.host_store(host, self._config.timeout_s)
        self._staging = ipc.new_staging(self._plan, self._model.device) if shared_device else None
        return self._store.port, self._staging[1] if self._staging else None

    def join(self, consumers: int) -> None:
        """Meet this rank's consumers; returns when all have joined. A rank without consumers only exports."""
        if self._plan is None or self._config is None or self._store is None:
            raise RuntimeError("join needs plan and open first")
        if not consumers:
            return
        verify, limit = self._config.verify, self._config.timeout_s
        device = self._model.device if self._staging is None else torch.device("cpu")
        group = refit_group.join(self._store, 0, 1 + consumers, device, limit)
        if self._staging is None:
            self.sender = BroadcastSender(self._plan, group, verify, self._config.num_buffers)
        else:
            staging, handle = self._staging
            group.meet("the staging buffer")
            ipc.forget(handle)
            self.sender = ipc.IpcSender(self._plan, group, staging, verify)

    def send(self) -> RefitReport | None:
        """Send the current weights to this rank's consumers; without any, take part in the export all the same."""
        if self.sender is not None:
            return self.sender.send(self.export() if self.views is None else self.views)
        if not self._model.place.is_whole:
            for _ in self.export():
                pass
        return None

    def export(self, to_host: bool = False) -> Iterable[Named]:
        """All weights under their Hugging Face names, by megatron-bridge; the same on every rank."""
        on_host = to_host or self._model.device.type == "cpu"
        return self._model.bridge.export_hf_weights(
            self._model.chunks, cpu=on_host, show_progress=False, conversion_tasks=self._tasks()
        )

    @property
    def _as_it_is(self) -> bool:
        """Whether weights are exported as they are in this rank's memory."""
        return self._model.place.is_whole and self._model.lora is None

    def _tasks(self) -> list[Any]:
        if self._conversion_tasks is None:
            self._conversion_tasks = self._model.bridge.get_conversion_tasks(self._model.chunks)
        return self._conversion_tasks
