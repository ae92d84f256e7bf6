"""Read single weights of a checkpoint, without the others.

megatron-core reads a tensor only as a whole, such as the stacked weights of all layers.
"""

from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.policy.checkpoint_reading import reading


class SavedWeights:
    """Weights of a checkpoint, by their names in a model of one rank."""

    def __init__(self, model: Any, folder: Path, device: torch.device):
        """`model`: megatron-core's, which may be on the meta device. Raises CheckpointError: the index is damaged."""
        self._sharded, self._folder, self._device = model.sharded_state_dict(), folder, device
        with reading(folder) as reader:
            self._index = reader.read_metadata()

    def read(self, is_wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """Return the weights with wanted names, on the device. Raises CheckpointError: one is missing or damaged."""
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

        wanted = {
            name: one for name, one in self._sharded.items() if is_wanted(name) and not isinstance(one, ShardedObject)
        }
        parts = {name: one.build() if isinstance(one, ShardedTensorFactory) else one for name, one in wanted.items()}
        windows = [one for one in nested_values(parts) if isinstance(one, ShardedTensor)]
        read = dict(zip(map(id, windows), self._windows(windows), strict=True))
        tensors = dict_list_map_outplace(lambda one: read[id(one)], parts)
        return {
            name: one.merge_fn(tensors[name]) if isinstance(one, ShardedTensorFactory) else tensors[name]
            for name, one in wanted.items()
        }

    def _windows(self, windows: Iterable[Any]) -> list[Tensor]:
        """Return megatron-core's ShardedTensors with the checkpoint's values."""
        planner, items, made = _Planner(), list[ReadItem](), list[Tensor]()
        with reading(self._folder) as reader:
            reader.set_up_storage_reader(self._index, is_coordinator=True)
            for one in windows:
                sizes = (1,) * one.prepend_axis_num + tuple(one.local_shape)
                stored = self._index.state_dict_metadata.get(one.key)
                if not isinstance(stored, TensorStorageMetadata):
                    raise CheckpointError(f"{self._folder} has no {one.key}, so it is of another model")
                chunk = ChunkStorageMetadata(torch.Size(one.global_offset), torch.Size(sizes))
                found = create_read_items_for_chunk_list(one.key, stored, [chunk])
                # Rows that pad the vocabulary depend on the layout that saved it.
                if not one.allow_shape_mismatch and sum(prod(item.lengths) for item in found) != prod(sizes):
                    raise CheckpointError(f"{one.key} in {self._folder} has another shape, or a part is missing")
                target = torch.zeros(sizes, dtype=one.dtype, device=self._device)
                planner.targets |= {item.dest_index: target for item in found}
                items += found
                made.append(target.view(one.local_shape))
            reader.read_data(LoadPlan(items), planner).wait()
        return made


class _Planner(DefaultLoadPlanner):
    """Gives the reader the tensor of each item."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[Any, Tensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        bounds = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.targets[read_item.dest_index][tuple(slice(begin, begin + size) for begin, size in bounds)]
