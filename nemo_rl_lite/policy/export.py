"""Export a rank's weights with Hugging Face names, with megatron-bridge, and send them in refits.

The bridge gathers, splits and renames weights in Python, tensor by tensor. `find_export` traces it once with element
numbers instead of values. Refits then copy without the bridge, for tensor, pipeline and expert parallelism, fused
projections, stacked experts, tied embeddings and padded vocabularies.

Stages of a refit: `plan_refit`, `Producer.open`, `Producer.join`, and `Sender.send` for each refit. All are collective.
A new connection starts at `Producer.open`.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.compat import megatron
from nemo_rl_lite.config.schema import RefitConfig
from nemo_rl_lite.config.sizes import bucket_size
from nemo_rl_lite.policy.model import MegatronModel
from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.buckets import (
    BroadcastBuffers,
    BucketBuffers,
    BucketReshard,
    SharedBuffer,
    Stream,
    assemble,
    bucket_transport,
)
from nemo_rl_lite.refit.group import all_gather
from nemo_rl_lite.refit.interface import (
    Export,
    NoConsumers,
    RefitReport,
    Sender,
    Transport,
    WeightSource,
)
from nemo_rl_lite.refit.ipc import DirectOffer, DirectSender, IpcExport, Parameters, probe_sharing
from nemo_rl_lite.refit.layout import Named, RefitPlan, Slot, buffer_of, dtype_name, make_plan, same_bytes, view
from nemo_rl_lite.refit.trace import IndexTracer, Recipe, Segment, trace_strided_copies
from nemo_rl_lite.refit.windows import WindowExport, find_replicas

log = logging.getLogger(__name__)


class Weights:
    """Export of the full model, with adapters merged. Both methods are collective."""

    def __init__(self, model: MegatronModel):
        self._model, self._on_cpu = model, model.device.type == "cpu"

    def tasks(self) -> list[Any]:
        """Return the bridge's conversion tasks, the same on all ranks. `param_weight` is None on ranks without it."""
        return self._model.bridge.get_conversion_tasks(self._model.chunks)

    def export(self, tasks: Iterable[Any]) -> Iterable[Named]:
        """Return the tensors of these tasks, the same on all ranks."""
        options: Any = {"cpu": self._on_cpu, "show_progress": False, "conversion_tasks": tasks}
        return self._model.bridge.export_hf_weights(self._model.chunks, **options)


class Adapters(Weights):
    """Export of all adapters with PEFT's names: `....q_proj.lora_A.weight` [rank, inputs] and `....lora_B.weight`
    [outputs, rank]. A layer that Megatron fuses has one adapter; its parts get the same A and rows of B."""

    _adapters: list[Any]
    """Each has two tasks, for A and B."""

    def tasks(self) -> list[Any]:
        self._adapters = megatron.adapter_conversions(self._model.bridge, self._model.chunks)
        return [task for one in self._adapters for task in (one.linear_in_task, one.linear_out_task)]

    def export(self, tasks: Iterable[Any]) -> Iterable[Named]:
        """Return the tensors of these tasks, which are in the order of `tasks()`."""
        pairs = zip(*[iter(tasks)] * 2, strict=True)
        adapters = [
            replace(adapter, linear_in_task=first, linear_out_task=second)
            for adapter, (first, second) in zip(self._adapters, pairs, strict=True)
        ]
        return megatron.export_adapters(self._model.bridge, self._model.chunks, adapters, self._on_cpu)


def export_weights(model: MegatronModel, tasks: Iterable[Any] | None = None) -> Iterable[Named]:
    """Return all weights with Hugging Face names, the same on all ranks. Collective. `tasks`: of the bridge, if the
    caller has them."""
    weights = Weights(model)
    return weights.export(weights.tasks() if tasks is None else tasks)


@dataclass(frozen=True)
class FoundExport:
    """Traced export of one rank."""

    parameters: dict[int, Tensor]
    """This rank's parameters by number."""
    recipe: dict[str, list[Segment]]
    """Segments of each exported tensor."""
    unlike: str | None
    """First tensor that is not just moved elements, if any."""


def find_export(model: MegatronModel, plan: RefitPlan, exported: Weights | None = None) -> FoundExport:
    """Trace the bridge's export on this rank. Collective.

    `plan`: of an earlier export. `exported`: `Weights` if None; no other export may use its tasks, which cache shapes
    and dtypes. Allocates 8 bytes per element of the largest weight, or about 20 if several ranks have parts of it.
    """
    exported = Weights(model) if exported is None else exported
    tasks = exported.tasks()
    known = {tensor.data_ptr() for tensor in model.state()}
    weights = [task.param_weight for task in tasks]
    described = all_gather([None if weight is None else _described(weight, known) for weight in weights])
    largest = max(one[0] for rank in described for one in rank if one is not None)
    numbering, rank = IndexTracer(len(described), largest), dist.get_rank()

    def numbered() -> Iterator[Any]:
        # One at a time, because numbers need more memory than parameters.
        for number, (task, weight) in enumerate(zip(tasks, weights, strict=True)):
            yield task if weight is None else replace(task, param_weight=numbering.number(rank, number, weight))

    slots = {slot.name: slot for bucket in plan.buckets for slot in bucket.slots}
    recipe: dict[str, list[Segment]] = {}
    unlike = None
    for name, numbers in exported.export(numbered()):
        if unlike is not None:
            # Other ranks still gather.
            continue
        segments = trace_strided_copies(numbers, numbering) if tuple(numbers.shape) == slots[name].shape else None
        if segments is None or not all(_fits(segment, slots[name], described) for segment in segments):
            unlike = name
        else:
            recipe[name] = segments
    own = {number: weight for number, weight in enumerate(weights) if weight is not None}
    return FoundExport(own, recipe, unlike)


def first_differing(recipe: Recipe, parameters: Parameters, exported: Iterable[Named]) -> str | None:
    """Return the first tensor that differs between the recipe and the bridge's export, or None. Exhausts the export,
    because other ranks may gather."""
    differing = None
    for name, tensor in exported:
        if differing is None:
            made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for segment in recipe[name]:
                source = parameters[segment.rank, segment.parameter]
                segment.target.of(made).copy_(segment.source.of(source.view(made.dtype)))
            differing = None if same_bytes(made, tensor) else name
    return differing


def _described(weight: Tensor, known: set[int]) -> tuple[int, str | None]:
    """Return a parameter's number of elements and dtype; None as dtype if a refit cannot copy it directly."""
    # Quantised tensors have their own classes, and a tensor that is not in the model's state may be replaced.
    plain = type(weight.data) is Tensor and weight.is_contiguous() and weight.data_ptr() in known
    return weight.numel(), dtype_name(weight.dtype) if plain else None


def _fits(segment: Segment, slot: Slot, described: list[list[tuple[int, str | None] | None]]) -> bool:
    rank = described[segment.rank]
    one = rank[segment.parameter] if segment.parameter < len(rank) else None
    return one is not None and one[1] == slot.dtype and segment.source.last < one[0]


@dataclass(frozen=True)
class Producer:
    """One rank's part in all refits."""

    plan: RefitPlan
    export: Export | None
    """Fills buckets: a `BucketReshard` if the export only moves elements, else megatron-bridge's export. None if
    consumers copy parameters, or if no rank needs this one."""
    transport: Transport | None
    """None without consumers."""
    windows: WindowExport | None
    """Sends windows after the first refit. None if engines share devices, or megatron-bridge exports."""
    device: torch.device
    timeout_s: float

    def open(self, host: str) -> tuple[dist.TCPStore, WeightSource | None]:
        """Return this rank's open rendezvous, and the weight source for consumers. Connections reuse buffers."""
        offer = None if self.transport is None else self.transport.offer()
        return refit_group.host_store(host, self.timeout_s), offer

    def join(self, store: dist.TCPStore, offer: WeightSource | None, consumers: int) -> Sender:
        """Wait until `consumers` engine ranks have joined what `open` returned. Returns the sender."""
        if self.transport is None or offer is None:
            return NoConsumers(self.export)
        device = offer.group_device(self.device)
        return self.transport.sender(refit_group.join(store, 0, 1 + consumers, device, self.timeout_s))

    def require_windows(self) -> WindowExport:
        """Return the export of windows. Raises RuntimeError: there is none."""
        if self.windows is None:
            raise RuntimeError("this policy sends no windows")
        return self.windows


def plan_refit(
    model: MegatronModel, config: RefitConfig, shared_device: bool, consumers: int, adapters_alone: bool = False
) -> Producer:
    """Plan buckets, the same on all ranks, and choose a transport. A traced export must be bitwise identical to
    megatron-bridge's.

    `shared_device`: each engine rank is on its policy rank's device. `consumers`: number of this rank's
    engine ranks if all live.
    `adapters_alone`: export LoRA adapters instead of the full model.
    """
    planning, device = _Planning(model, config, adapters_alone), model.device
    found = planning.found()
    sharing = None
    if found is not None and shared_device and device.type == "cuda" and config.cuda_ipc:
        sharing = probe_sharing(found.parameters, found.recipe, _groups(), config.timeout_s)
        if sharing is not None and not planning.only_moves(planning.first_unlike_shared(found.recipe, sharing)):
            found = None
    if found is not None and sharing is not None:
        log.info("transport of refits: direct")
        sender = partial(DirectSender, planning.plan, sharing=sharing)
        transport, export = Transport(partial(DirectOffer, found.recipe), sender) if consumers else None, None
        windows = None
    else:
        log.info("transport of refits: %s", "shared" if shared_device else "broadcast")
        transport, export, windows = planning.through_buckets(shared_device, found, consumers)
    if device.type == "cuda":
        # Free the memory of tracing for engines.
        torch.cuda.empty_cache()
    return Producer(planning.plan, export, transport, windows, device, config.timeout_s)


class _Planning:
    """Steps of `plan_refit`. All methods are collective."""

    def __init__(self, model: MegatronModel, config: RefitConfig, adapters_alone: bool):
        self._model, self._config = model, config
        self._kind = Adapters if adapters_alone else Weights
        self._export = self._kind(model)
        self._tasks = self._export.tasks()
        weights = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in self._exported()]
        on_gpu = model.device.type == "cuda"
        memory = torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total
        self.plan = make_plan(weights, bucket_size(config, memory))

    def found(self) -> FoundExport | None:
        """Return the traced export; None if it does more than move elements, such as merging adapters."""
        if self._model.lora is not None and self._kind is Weights:
            return None
        found = find_export(self._model, self.plan, self._kind(self._model))
        return found if self.only_moves(found.unlike) else None

    def first_unlike_shared(self, recipe: Recipe, sharing: IpcExport) -> str | None:
        """Return `first_differing` of the shared parameters."""
        with sharing.together() as parameters:
            return first_differing(recipe, parameters, self._exported())

    def through_buckets(
        self, shared_device: bool, found: FoundExport | None, consumers: int
    ) -> tuple[Transport | None, Export | None, WindowExport | None]:
        """Return this rank's transport, export and export of windows. The transport is None without consumers, the
        export if no rank needs it. Windows are None for shared devices, or if the export computes."""
        config, device = self._config, self._model.device
        buffers: BucketBuffers | None = None
        if consumers and shared_device:
            buffers = SharedBuffer(self.plan, device)
        elif consumers:
            buffers = BroadcastBuffers(self.plan, config.num_buffers, device)
        export = windows = None
        if found is not None:
            recipe = found.recipe if consumers else None
            export = assemble(self.plan, found.parameters, recipe, device, _groups(), config.timeout_s)
            if not self.only_moves(self._first_unlike_assembled(export, buffers)):
                found = None
        if found is not None and not shared_device:
            windows = self._windows(found, buffers)
        if found is None:
            export = Stream(self.plan, self._exported, gathers=not self._model.place.is_whole)
        if buffers is None or export is None:
            return None, export, windows
        return bucket_transport(self.plan, buffers, config.verify, export), export, windows

    def _windows(self, found: FoundExport, buffers: BucketBuffers | None) -> WindowExport:
        memory = None if buffers is None else buffers.memory
        largest = max(bucket.nbytes for bucket in self.plan.buckets)
        replicas = find_replicas(found.recipe)
        recipe = found.recipe if replicas else {}
        return WindowExport(found.parameters, recipe, replicas, memory, largest, self._model.device)

    def _first_unlike_assembled(self, assembly: BucketReshard | None, buffers: BucketBuffers | None) -> str | None:
        """Return the first tensor that differs between the assembly and megatron-bridge's export, or None."""
        exported, report, unlike = iter(self._exported()), RefitReport(), None
        if assembly is not None:
            assembly.start()
        for index, bucket in enumerate(self.plan.buckets):
            buffer = None if buffers is None else buffer_of(self.plan, buffers.memory, index)
            if assembly is not None:
                assembly.begin(index, report)
                assembly.fill(index, buffer, report)
            for slot, (_, tensor) in zip(bucket.slots, exported, strict=False):
                if buffer is not None and unlike is None and not same_bytes(view(buffer, slot), tensor):
                    unlike = slot.name
        # Other ranks may still gather.
        for _ in exported:
            pass
        return unlike

    def only_moves(self, unlike: str | None) -> bool:
        """Return whether `unlike` is None on all ranks."""
        name = next((one for one in all_gather(unlike) if one is not None), None)
        if name is not None and dist.get_rank() == 0:
            log.warning("megatron-bridge exports all weights at each refit: %s is more than moved elements", name)
        return name is None

    def _exported(self) -> Iterable[Named]:
        return self._export.export(self._tasks)


def _groups() -> list[Any]:
    """Return this rank's process groups that a refit may reuse."""
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
    ]
