"""States of megatron-core's distributed optimizer in checkpoints: each rank writes its own share, by parameter.

A rank has a range of the elements of some parameters. megatron-core has two formats. One gathers the states of whole
parameters on one rank. The other stores the ranges by bucket, which only the same layout can read. Here a range is a
few boxes of its parameter: whole rows, and the ends of two more. Ranks of any layout read the boxes that overlap with
theirs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.megatron import own_states, put_states, state_format

_PREFIX = "optimizer.state"


@contextmanager
def states_by_parameter(optimizer: Any) -> Iterator[None]:
    """Let megatron-core save and load the states of a distributed optimizer as `sharded_states` within the block."""
    with state_format(optimizer, lambda part: (partial(sharded_states, part), partial(load_states, part))):
        yield


def sharded_states(part: Any, weights: Mapping[str, Any]) -> dict[int, Any]:
    """Return this rank's states as megatron-core's sharded tensors, which share memory with them.

    Args:
        part: a DistributedOptimizer, with states.
        weights: the model's `sharded_state_dict`.

    Raises:
        NotImplementedError: megatron-core saves a parameter in parts that are not contiguous, or only some of them.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    described = {
        id(value.data): value
        for value in nested_values(dict(weights))
        if isinstance(value, (ShardedTensor, ShardedTensorFactory))
    }
    return {
        number: {
            name: dict(enumerate(_boxes_of(f"{_PREFIX}.{name}.", state, range_, described[id(parameter)])))
            for name, state in states.items()
        }
        for number, (parameter, range_, states) in enumerate(own_states(part))
    }


def load_states(part: Any, loaded: Mapping[int, Mapping[str, Mapping[int, Tensor]]]) -> None:
    """Take over states that were read into `sharded_states`."""

    def joined(boxes: Mapping[int, Tensor]) -> Tensor:
        flat = [box.flatten() for _, box in sorted(boxes.items())]
        # Most states are a single box, which was read into the state's own memory.
        return torch.cat(flat) if len(flat) > 1 else flat[0]

    own = zip(own_states(part), sorted(loaded.items()), strict=True)
    put_states(
        part,
        ((parameter, {name: joined(boxes) for name, boxes in states.items()}) for (parameter, *_), (_, states) in own),
    )


def _boxes_of(prefix: str, state: Tensor, range_: range, described: Any) -> Iterator[Any]:
    """Yield the sharded tensors of the elements `range_` of a parameter, which `state` has."""
    taken = 0
    for tensor, begin in sorted(_tensors_of(described), key=lambda one: one[1]):
        first, last = max(range_.start, begin), min(range_.stop, begin + math.prod(tensor.local_shape))
        axes = tensor.prepend_axis_num
        for offset, sizes in boxes(tensor.local_shape, first - begin, last - begin):
            shape, count = (1,) * axes + sizes, math.prod(sizes)
            place = (0,) * axes + offset
            yield replace(
                tensor,
                key=prefix + tensor.key,
                data=state.detach()[taken : taken + count].view(shape),
                dtype=state.dtype,
                local_shape=shape,
                global_offset=tuple(a + b for a, b in zip(tensor.global_offset, place, strict=True)),
                axis_fragmentations=None,
                prepend_axis_num=0,
                # Data-parallel ranks have different boxes.
                replica_id=(*tensor.replica_id[:2], 0),
            )
            taken += count
    if taken < state.numel():
        raise NotImplementedError(f"megatron-core saves a part of {described.key}")


def _tensors_of(described: Any) -> Iterator[tuple[Any, int]]:
    """Yield the sharded tensors that a parameter is saved as, each with its first element in the parameter."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    whole: Any = described.data
    for tensor in [described] if isinstance(described, ShardedTensor) else nested_values(described.build()):
        own: Any = tensor.data
        if not own.is_contiguous() or own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            raise NotImplementedError(f"megatron-core divides {tensor.key} into parts that are not contiguous")
        yield tensor, own.storage_offset() - whole.storage_offset()


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size in each dimension."""


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return boxes that divide the elements from `begin` to `end` of a contiguous tensor, in order. Each box is
    contiguous; there are at most 2 x dimensions - 1."""
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    row, rest = math.prod(shape[1:]), tuple(shape[1:])

    def within(number: int, first: int, last: int) -> list[Box]:
        return [((number, *offset), (1, *sizes)) for offset, sizes in boxes(rest, first, last)]

    first, last = -(-begin // row), end // row
    if first > last:
        return within(last, begin - last * row, end - last * row)
    before = within(first - 1, begin - (first - 1) * row, row) if begin < first * row else []
    whole = [((first, *(0 for _ in rest)), (last - first, *rest))] if first < last else []
    return before + whole + within(last, 0, end - last * row)
