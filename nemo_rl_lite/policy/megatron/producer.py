"""The policy's side of refits on one rank: what it exports, in which buckets, and to which consumers.

The stages are types, and each is made by the one before: `plan_refit` -> `Producer.open` -> `OpenProducer.join` -> a
`Sender`, whose `send` is called at each refit. All of them are collective: every rank of the policy calls them. A new
connection begins at `Producer.open`.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist

from nemo_rl_lite.config.sections.generation import RefitConfig
from nemo_rl_lite.policy.megatron.export_recipe import FoundExport, find_export, first_differing
from nemo_rl_lite.policy.megatron.exports import Adapters, Weights
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.refit.layout.packing import Named, buffer_of, dtype_name, same_bytes, view
from nemo_rl_lite.refit.layout.plan import RefitPlan, bucket_size, make_plan
from nemo_rl_lite.refit.layout.views import Recipe
from nemo_rl_lite.refit.transport import group as refit_group
from nemo_rl_lite.refit.transport.assembly import Assembly, assemble
from nemo_rl_lite.refit.transport.broadcast import BroadcastBuffers
from nemo_rl_lite.refit.transport.buckets import BucketBuffers, bucket_transport
from nemo_rl_lite.refit.transport.choice import Facts, Kind, choose_transport
from nemo_rl_lite.refit.transport.direct import DirectOffer, DirectSender
from nemo_rl_lite.refit.transport.export import Stream
from nemo_rl_lite.refit.transport.interface import Export, NoConsumers, Offer, Sender, Transport
from nemo_rl_lite.refit.transport.rank_groups import all_gather
from nemo_rl_lite.refit.transport.report import RefitReport
from nemo_rl_lite.refit.transport.shared import SharedBuffer
from nemo_rl_lite.refit.transport.sharing import Sharing, probe_sharing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Producer:
    """One rank's part in all refits, once everything is done that is done once.

    `export` fills buckets: an `Assembly` if the export only moves elements, else megatron-bridge's export. It is None
    if consumers copy parameters, or if no rank needs this one. `transport` is None on a rank without consumers.
    """

    plan: RefitPlan
    export: Export | None
    transport: Transport | None
    consumers: int
    device: torch.device
    timeout_s: float

    def open(self, host: str) -> "OpenProducer":
        """Open this rank's meeting point, also for a new connection, which uses the buffers of the one before."""
        offer = None if self.transport is None else self.transport.offer()
        return OpenProducer(self, refit_group.host_store(host, self.timeout_s), offer)


@dataclass(frozen=True)
class OpenProducer:
    """A producer whose consumers can join. `offer` is for them."""

    producer: Producer
    store: dist.TCPStore
    offer: Offer | None

    def join(self) -> Sender:
        """Meet this rank's consumers; returns when all have joined."""
        own = self.producer
        if own.transport is None or self.offer is None:
            return NoConsumers(own.export)
        device = self.offer.group_device(own.device)
        return own.transport.sender(refit_group.join(self.store, 0, 1 + own.consumers, device, own.timeout_s))


def plan_refit(
    model: MegatronModel, config: RefitConfig, shared_device: bool, consumers: int, adapters_alone: bool = False
) -> Producer:
    """Lay the exported weights into buckets, the same on every rank, and choose a transport.

    What replaces megatron-bridge's export is compared with it first, bit by bit. `shared_device`: whether each engine
    rank is on the device of its policy rank. `consumers`: the number of engine ranks that this rank sends to.
    `adapters_alone`: export LoRA's matrices instead of all weights.
    """
    planning, device = _Planning(model, config, adapters_alone), model.device
    found = planning.found()
    facts, sharing = Facts(shared_device, device.type == "cuda", config.direct, has_recipe=found is not None), None
    if found is not None and choose_transport(facts) == "direct":
        sharing, one_machine, opens = probe_sharing(found.parameters, found.recipe, _groups(), config.timeout_s)
        if opens and not planning.only_moves(planning.first_unlike_shared(found.recipe, sharing)):
            found = None
        facts = replace(facts, has_recipe=found is not None, one_machine=one_machine, memory_opens=opens)
    kind = choose_transport(facts)
    log.info("transport of refits: %s", kind)
    if kind == "direct" and found is not None and sharing is not None:
        sender = partial(DirectSender, planning.plan, sharing=sharing)
        transport, export = Transport(partial(DirectOffer, found.recipe), sender) if consumers else None, None
    else:
        transport, export = planning.through_buckets(kind, found, consumers)
    if device.type == "cuda":
        # Engines on this device want the memory that the search took.
        torch.cuda.empty_cache()
    return Producer(planning.plan, export, transport, consumers, device, config.timeout_s)


class _Planning:
    """The steps of `plan_refit`. Every method is collective."""

    def __init__(self, model: MegatronModel, config: RefitConfig, adapters_alone: bool):
        self._model, self._config = model, config
        self._kind = Adapters if adapters_alone else Weights
        self._export = self._kind(model)
        self._tasks = self._export.tasks()
        weights = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in self._exported()]
        on_gpu = model.device.type == "cuda"
        memory = torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total
        self.plan = make_plan(weights, bucket_size(memory, config.buffer_memory_ratio, config.bucket_bytes))

    def found(self) -> FoundExport | None:
        """What the export moves; None if it does more."""
        if self._model.lora is not None and self._kind is Weights:
            # Adapters are merged into what is exported.
            return None
        found = find_export(self._model, self.plan, self._kind(self._model))
        return found if self.only_moves(found.unlike) else None

    def first_unlike_shared(self, recipe: Recipe, sharing: Sharing) -> str | None:
        """The first tensor that the recipe makes of the shared parameters with other bytes than megatron-bridge."""
        with sharing.together() as parameters:
            return first_differing(recipe, parameters, self._exported())

    def through_buckets(
        self, kind: Kind, found: FoundExport | None, consumers: int
    ) -> tuple[Transport | None, Export | None]:
        """The transport of this rank if it has consumers, and what fills its buckets if a rank needs it."""
        config, device = self._config, self._model.device
        buffers: BucketBuffers | None = None
        if consumers and kind == "shared":
            buffers = SharedBuffer(self.plan, device)
        elif consumers:
            buffers = BroadcastBuffers(self.plan, config.num_buffers, device)
        export = None
        if found is not None:
            recipe = found.recipe if consumers else None
            export = assemble(self.plan, found.parameters, recipe, device, _groups(), config.timeout_s)
            if not self.only_moves(self._first_unlike_assembled(export, buffers)):
                found = None
        if found is None:
            export = Stream(self.plan, self._exported, gathers=not self._model.place.is_whole)
        if buffers is None or export is None:
            return None, export
        return bucket_transport(self.plan, buffers, config.verify, export), export

    def _first_unlike_assembled(self, assembly: Assembly | None, buffers: BucketBuffers | None) -> str | None:
        """The first tensor that the assembly makes with other bytes than megatron-bridge, in the `buffers`."""
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
        """Whether no rank has found a tensor that is more than moved elements; `unlike`: what this rank has found."""
        name = next((one for one in all_gather(unlike) if one is not None), None)
        if name is not None and dist.get_rank() == 0:
            log.warning("megatron-bridge exports all weights at each refit: %s is more than moved elements", name)
        return name is None

    def _exported(self) -> Iterable[Named]:
        return self._export.export(self._tasks)


def _groups() -> list[Any]:
    """This rank's process groups, which may be those that a refit needs."""
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
    ]
