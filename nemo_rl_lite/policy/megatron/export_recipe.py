"""megatron-bridge's export, found once: which elements of which rank's parameters each Hugging Face tensor has.

The bridge names, gathers, splits and renames weights in Python, tensor by tensor. Here it does so once with the places
of the elements instead of their values, and what comes out says how to do without it: through tensor, pipeline and
expert parallelism, fused projections, stacked experts, tied embeddings and padded vocabularies alike.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.refit.boxes import Box, Places, find_boxes
from nemo_rl_lite.refit.lending import Parameters
from nemo_rl_lite.refit.packing import dtype_name, same_bytes
from nemo_rl_lite.refit.plan import RefitPlan, Slot
from nemo_rl_lite.refit.report import Named
from nemo_rl_lite.refit.routes import Recipe


@dataclass(frozen=True)
class _Part:
    """What other ranks must know of a parameter. `dtype`: None where its elements are not what is exported."""

    elements: int
    dtype: str | None


@dataclass(frozen=True)
class FoundExport:
    """What one rank has found. `parameters`: its own, by number; `recipe`: of every tensor, as this rank would have
    it exported; `unlike`: the first tensor that is more than moved elements, where there is one."""

    parameters: dict[int, Tensor]
    recipe: dict[str, list[Box]]
    unlike: str | None


def find_export(model: MegatronModel, plan: RefitPlan) -> FoundExport:
    """What the bridge's export does on this rank; collective. `plan`: as it was exported before.

    Takes eight bytes an element of the largest weight, about three times where several ranks have parts of it.
    """
    # The mappings of tasks keep shapes and dtypes of what they have seen, so these are others than those of the export.
    tasks = model.bridge.get_conversion_tasks(model.chunks)
    known = {parameter.data_ptr() for parameter in model.parameters()}
    parts = [None if task.param_weight is None else _part(task.param_weight, known) for task in tasks]
    everyones: list[list[_Part | None]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, parts)
    largest = max(part.elements for parts in everyones for part in parts if part is not None)
    places, rank = Places(len(everyones), largest), dist.get_rank()

    def numbered() -> Iterator[Any]:
        """One after the other, because the numbers take more memory than the parameters."""
        for number, task in enumerate(tasks):
            weight = task.param_weight
            yield task if weight is None else replace(task, param_weight=places.number(rank, number, weight))

    slots = {slot.name: slot for bucket in plan.buckets for slot in bucket.slots}
    recipe: dict[str, list[Box]] = {}
    unlike = None
    exported = model.bridge.export_hf_weights(
        model.chunks, cpu=model.device.type == "cpu", show_progress=False, conversion_tasks=numbered()
    )
    for name, numbers in exported:
        if unlike is not None:
            # The others still need this rank's part in what the bridge gathers.
            continue
        boxes = find_boxes(numbers, places) if tuple(numbers.shape) == slots[name].shape else None
        if boxes is None or not all(_fits(box, slots[name], everyones) for box in boxes):
            unlike = name
        else:
            recipe[name] = boxes
    own = {number: task.param_weight for number, task in enumerate(tasks) if task.param_weight is not None}
    return FoundExport(own, recipe, unlike)


def first_differing(recipe: Recipe, parameters: Parameters, exported: Iterable[Named]) -> str | None:
    """The first tensor that megatron-bridge exports otherwise than the recipe puts it together of these parameters.
    Other ranks may gather, so all that is exported is gone through."""
    differing = None
    for name, tensor in exported:
        if differing is None:
            made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for box in recipe[name]:
                source = parameters[box.piece.rank, box.piece.part]
                box.of(made).copy_(box.piece.of(source.view(made.dtype)))
            differing = None if same_bytes(made, tensor) else name
    return differing


def _part(weight: Tensor, known: set[int]) -> _Part:
    # Quantised tensors are of classes of their own, and what is no parameter may be replaced by another tensor.
    plain = type(weight.data) is Tensor and weight.is_contiguous() and weight.data_ptr() in known
    return _Part(weight.numel(), dtype_name(weight.dtype) if plain else None)


def _fits(box: Box, slot: Slot, everyones: list[list[_Part | None]]) -> bool:
    parts = everyones[box.piece.rank]
    part = parts[box.piece.part] if box.piece.part < len(parts) else None
    return part is not None and part.dtype == slot.dtype and box.piece.last < part.elements
