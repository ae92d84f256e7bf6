"""The policy's side of a refit on one rank: what it exports, in which buckets, and to whom."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.config.schema import RefitConfig
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.policy.megatron.export_recipe import FoundExport, find_export, first_differing
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit import ipc
from nemo_rl_lite.refit.assembly import Assembly, assemble
from nemo_rl_lite.refit.broadcast import BroadcastSender
from nemo_rl_lite.refit.consumer import Shared
from nemo_rl_lite.refit.direct import DirectSender, DirectSource
from nemo_rl_lite.refit.lending import Key, Lending, find_lending
from nemo_rl_lite.refit.packing import Stream, dtype_name, same_bytes, view
from nemo_rl_lite.refit.plan import RefitPlan, bucket_size, make_plan
from nemo_rl_lite.refit.report import Named, RefitReport

log = logging.getLogger(__name__)


class Producer:
    """`plan`, `open` and `join` once, in this order, then `send` as often as there are new weights. Every method is
    collective: all ranks of the policy call it.

    `assembly`: what makes the buckets without megatron-bridge, where `join` has found that it can be done and this rank
    has a part in it; `sender`: that to this rank's consumers, where it has any. Consumers on GPUs of one machine that
    have the whole policy between them need no buckets: they copy its parameters.
    """

    def __init__(self, model: MegatronModel):
        self._model = model
        self._conversion_tasks: list[Any] | None = None
        self._config: RefitConfig | None = None
        self._plan: RefitPlan | None = None
        self._found: FoundExport | None = None
        self.assembly: Assembly | None = None
        self._assembled = self._checked = False
        self._lending: Lending | None = None
        self._asked_to_lend = False
        self._store: Any = None
        self._staging: tuple[Tensor, ipc.StagingHandle] | None = None
        self.sender: BroadcastSender | ipc.IpcSender | DirectSender | None = None

    def plan(self, config: RefitConfig) -> RefitPlan:
        """Lay the exported weights into buckets; the same plan on every rank."""
        self._config = config
        self._found = self.assembly = self._lending = None
        self._assembled = self._checked = self._asked_to_lend = False
        weights = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in self.export()]
        memory = psutil.virtual_memory().total
        if self._model.device.type == "cuda":
            memory = torch.cuda.mem_get_info()[1]
        size = bucket_size(memory, config.buffer_memory_ratio, config.bucket_bytes)
        self._plan = make_plan(weights, size)
        # Adapters are merged into what is exported.
        if self._model.lora is None:
            self._found = find_export(self._model, self._plan)
            self._agree(self._found.unlike)
        if self._found is not None and self._model.place.is_whole:
            rank = dist.get_rank()
            self._check({(rank, number): parameter for number, parameter in self._found.parameters.items()})
        if self._found is not None:
            parts = sum(len(boxes) for boxes in self._found.recipe.values())
            log.info("weights are copied from %d parts of parameters at each refit", parts)
        if self._model.device.type == "cuda":
            # What the search took is the engine's, on a device that both use.
            torch.cuda.empty_cache()
        return self._plan

    def open(self, host: str, shared_device: bool) -> tuple[int, Shared | None]:
        """Open this rank's meeting point; its port, and for consumers on the same device what they need to get at the
        weights there. The first time the parameters are where `plan` found them."""
        if self._plan is None or self._config is None:
            raise RuntimeError("open needs plan first")
        # Those of a connection before, if there was one, make room first.
        self.sender = self._staging = None
        if self.assembly is not None:
            self.assembly.forget_buffers()
        self._store = refit_group.host_store(host, self._config.timeout_s)
        if not shared_device:
            return self._store.port, None
        if not self._asked_to_lend:
            self._lending, self._asked_to_lend = self._lend(self._config), True
        if self._lending is not None and self._found is not None:
            return self._store.port, DirectSource(self._found.recipe)
        self._staging = ipc.new_staging(self._plan, self._model.device)
        return self._store.port, self._staging[1]

    def join(self, consumers: int) -> None:
        """Meet this rank's consumers; returns when all have joined."""
        if self._plan is None or self._config is None or self._store is None:
            raise RuntimeError("join needs plan and open first")
        if self._found is not None and self._lending is None and not self._assembled:
            found, device = self._found, self._model.device
            recipe, limit = found.recipe if consumers else None, self._config.timeout_s
            self.assembly = assemble(self._plan, found.parameters, recipe, device, _groups(), limit)
            self._assembled = True
        if not consumers:
            return
        verify, limit = self._config.verify, self._config.timeout_s
        shared_device = self._lending is not None or self._staging is not None
        device = torch.device("cpu") if shared_device else self._model.device
        group = refit_group.join(self._store, 0, 1 + consumers, device, limit)
        if self._lending is not None:
            self.sender = DirectSender(self._plan, group, self._lending)
        elif self._staging is None:
            self.sender = BroadcastSender(self._plan, group, verify, self._config.num_buffers)
        else:
            staging, handle = self._staging
            group.meet("the staging buffer")
            ipc.forget(handle)
            self.sender = ipc.IpcSender(self._plan, group, staging, verify)

    def send(self) -> RefitReport | None:
        """Send the current weights to this rank's consumers; without any, take part in the export all the same."""
        if self._plan is None:
            raise RuntimeError("send needs plan, open and join first")
        if self._found is not None and not self._checked:
            self._agree(self._differing(self._plan))
            self._checked = True
        if isinstance(self.sender, DirectSender):
            return self.sender.lend()
        if self._found is None:
            return self._send_by_the_bridge(self._plan)
        if self.assembly is None:
            return None
        if self.sender is None:
            self.assembly.take_part()
            return None
        before = self.assembly.refits
        try:
            return self.sender.send(self.assembly)
        except RefitError:
            if self.assembly.refits == before:
                self.assembly.finish(self.sender.buffer)
            raise

    def export(self) -> Iterable[Named]:
        """All weights under their Hugging Face names, by megatron-bridge; the same on every rank."""
        return self._model.bridge.export_hf_weights(
            self._model.chunks,
            cpu=self._model.device.type == "cpu",
            show_progress=False,
            conversion_tasks=self._tasks(),
        )

    def _lend(self, config: RefitConfig) -> Lending | None:
        """How consumers get at the parameters without buckets, checked against megatron-bridge's export; None where
        they cannot."""
        found, device = self._found, self._model.device
        if found is None or not config.direct or device.type != "cuda":
            return None
        lending = find_lending(found.parameters, found.recipe, _groups(), config.timeout_s)
        if lending is not None and not self._checked:
            with lending.together() as parameters:
                self._check(parameters)
            torch.cuda.empty_cache()
        return lending if self._found is not None else None

    def _check(self, parameters: Mapping[Key, Tensor]) -> None:
        """Compare what has been found with megatron-bridge's export, where this rank has all it needs at hand."""
        if self._found is not None:
            self._agree(first_differing(self._found.recipe, parameters, self.export()))
            self._checked = True

    def _send_by_the_bridge(self, plan: RefitPlan) -> RefitReport | None:
        if self.sender is not None and not isinstance(self.sender, DirectSender):
            exported = iter(self.export())
            try:
                return self.sender.send(Stream(plan, exported))
            except RefitError:
                # The others gather to the end.
                for _ in exported:
                    pass
                raise
        if not self._model.place.is_whole:
            for _ in self.export():
                pass
        return None

    def _differing(self, plan: RefitPlan) -> str | None:
        """The first tensor of which the assembly makes other bytes than megatron-bridge; before the first refit, when
        nobody reads the sender's buffers yet."""
        exported, report, differing = iter(self.export()), RefitReport(), None
        for index, bucket in enumerate(plan.buckets):
            sender = None if isinstance(self.sender, DirectSender) else self.sender
            buffer = None if sender is None else sender.buffer(index)
            if self.assembly is not None:
                self.assembly.begin(index, report)
                self.assembly.fill(index, buffer, report)
            for slot, (_, tensor) in zip(bucket.slots, exported, strict=False):
                if buffer is not None and differing is None and not same_bytes(view(buffer, slot), tensor):
                    differing = slot.name
        # The others may still gather.
        for _ in exported:
            pass
        return differing

    def _agree(self, unlike: str | None) -> None:
        """Leave the export to megatron-bridge on all ranks where one has found a tensor that takes more than moving."""
        everyones: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, unlike)
        name = next((one for one in everyones if one is not None), None)
        if name is None:
            return
        self._found = self.assembly = None
        if dist.get_rank() == 0:
            log.warning("megatron-bridge exports all weights at each refit: %s is more than moved elements", name)

    def _tasks(self) -> list[Any]:
        if self._conversion_tasks is None:
            self._conversion_tasks = self._model.bridge.get_conversion_tasks(self._model.chunks)
        return self._conversion_tasks


def _groups() -> list[Any]:
    """Process groups that this rank is in already, some of which may be those that a refit needs."""
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
    ]
