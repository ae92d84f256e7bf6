"""Write weights as safetensors shards with their index, one shard in memory at a time."""

import json
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_lite.models.folder import INDEX, SHARD_BYTES

# A temporary name; the number of shards is unknown until the end.
_UNFINISHED = "shard-{:05d}.safetensors"


class ShardWriter:
    """Writes the shards of a Hugging Face folder.

    Ranks that share the work `add` the same tensors in the same order. Shard i is collected and written by rank
    i % `ranks`, so a rank holds at most one shard. A tensor above `shard_bytes` is a separate shard.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES, rank: int = 0, ranks: int = 1):
        self._folder, self._limit, self._rank, self._ranks = folder, shard_bytes, rank, ranks
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = [[]]
        self._bytes = self._total = 0
        self._elements = Counter[torch.dtype]()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which may change afterwards. Raises OSError or SafetensorError: a shard was not written."""
        if self._shards[-1] and self._bytes + tensor.nbytes > self._limit:
            self._write()
            self._shards.append([])
            self._bytes = 0
        if (len(self._shards) - 1) % self._ranks == self._rank:
            self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._shards[-1].append(name)
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes
        if tensor.is_floating_point():
            self._elements[tensor.dtype] += tensor.numel()

    def close(self) -> None:
        """Write the last shard, and give this rank's shards their names; rank 0 writes the index. Raises as `add`."""
        self._write()
        for index in range(self._rank, len(self._shards), self._ranks):
            (self._folder / _UNFINISHED.format(index)).rename(self._folder / self._name(index))
        if self._rank == 0 and len(self._shards) > 1:
            files = {name: self._name(index) for index, names in enumerate(self._shards) for name in names}
            content = {"metadata": {"total_size": self._total}, "weight_map": files}
            (self._folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")

    @property
    def dtype(self) -> str:
        """The dtype of most elements, such as bfloat16."""
        return str(self._elements.most_common(1)[0][0]).removeprefix("torch.")

    def _write(self) -> None:
        if self._held:
            file = self._folder / _UNFINISHED.format(len(self._shards) - 1)
            save_file(self._held, file, metadata={"format": "pt"})
            self._held.clear()

    def _name(self, index: int) -> str:
        count = len(self._shards)
        return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
