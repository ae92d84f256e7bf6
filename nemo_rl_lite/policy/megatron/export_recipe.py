"""megatron-bridge's export, and its recipe: which elements of which rank's parameters each Hugging Face tensor has.

The bridge names, gathers, splits and renames weights in Python, tensor by tensor. `find_export` lets it do so once with
the numbers of the elements instead of their values. What comes out is how to do without the bridge: through tensor,
pipeline and expert parallelism, fused projections, stacked experts, tied embeddings and padded vocabularies alike.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.policy.megatron.exports import Exported, Weights
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.refit.layout.packing import Named, dtype_name, same_bytes
from nemo_rl_lite.refit.layout.plan import RefitPlan, Slot
from nemo_rl_lite.refit.layout.views import Numbering, Recipe, Segment, find_segments
from nemo_rl_lite.refit.transport.rank_groups import all_gather
from nemo_rl_lite.refit.transport.sharing import Parameters


def export_weights(model: MegatronModel, tasks: Iterable[Any] | None = None) -> Iterable[Named]:
    """All weights under their Hugging Face names, by megatron-bridge; the same on every rank, and collective.

    `tasks`: the bridge's conversion tasks, where the caller has them.
    """
    weights = Weights(model)
    return weights.export(weights.tasks() if tasks is None else tasks)


@dataclass(frozen=True)
class _Described:
    """What other ranks must know of a parameter. `dtype`: None if the export uses more than the parameter's
    elements."""

    elements: int
    dtype: str | None


@dataclass(frozen=True)
class FoundExport:
    """What one rank has found: its `parameters` by number, the `recipe` by which it would have all tensors exported,
    and the first tensor that is more than moved elements, `unlike`, if there is one."""

    parameters: dict[int, Tensor]
    recipe: dict[str, list[Segment]]
    unlike: str | None


def find_export(model: MegatronModel, plan: RefitPlan, exported: Exported | None = None) -> FoundExport:
    """Find what the bridge's export does on this rank; collective. `plan`: of an earlier export. `exported`: what is
    exported, all weights if None; an object that made no tasks for anybody else.

    Takes eight bytes for each element of the largest weight, and about 20 if several ranks have parts of it.
    """
    # The mappings of tasks cache shapes and dtypes, so these tasks are not those of the export.
    exported = Weights(model) if exported is None else exported
    tasks = exported.tasks()
    known = {parameter.data_ptr() for parameter in model.parameters()}
    weights = [task.param_weight for task in tasks]
    described = all_gather([None if weight is None else _described(weight, known) for weight in weights])
    largest = max(one.elements for rank in described for one in rank if one is not None)
    numbering, rank = Numbering(len(described), largest), dist.get_rank()

    def numbered() -> Iterator[Any]:
        """The tasks one by one, because the numbers take more memory than the parameters."""
        for number, (task, weight) in enumerate(zip(tasks, weights, strict=True)):
            yield task if weight is None else replace(task, param_weight=numbering.number(rank, number, weight))

    slots = {slot.name: slot for bucket in plan.buckets for slot in bucket.slots}
    recipe: dict[str, list[Segment]] = {}
    unlike = None
    for name, numbers in exported.export(numbered()):
        if unlike is not None:
            # Other ranks still need this rank's parameters in what the bridge gathers.
            continue
        segments = find_segments(numbers, numbering) if tuple(numbers.shape) == slots[name].shape else None
        if segments is None or not all(_fits(segment, slots[name], described) for segment in segments):
            unlike = name
        else:
            recipe[name] = segments
    own = {number: weight for number, weight in enumerate(weights) if weight is not None}
    return FoundExport(own, recipe, unlike)


def first_differing(recipe: Recipe, parameters: Parameters, exported: Iterable[Named]) -> str | None:
    """The first tensor whose bytes differ between the bridge's export and what the recipe makes of these parameters.
    All of the export is iterated over, because other ranks may gather."""
    differing = None
    for name, tensor in exported:
        if differing is None:
            made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for segment in recipe[name]:
                source = parameters[segment.rank, segment.parameter]
                segment.target.of(made).copy_(segment.source.of(source.view(made.dtype)))
            differing = None if same_bytes(made, tensor) else name
    return differing


def _described(weight: Tensor, known: set[int]) -> _Described:
    # Quantised tensors have their own classes, and a tensor that is no parameter may be replaced by another tensor.
    plain = type(weight.data) is Tensor and weight.is_contiguous() and weight.data_ptr() in known
    return _Described(weight.numel(), dtype_name(weight.dtype) if plain else None)


def _fits(segment: Segment, slot: Slot, described: list[list[_Described | None]]) -> bool:
    rank = described[segment.rank]
    one = rank[segment.parameter] if segment.parameter < len(rank) else None
    return one is not None and one.dtype == slot.dtype and segment.source.last < one.elements
