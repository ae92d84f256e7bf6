"""Reads the pickles of a distributed checkpoint safely: tensors and its own records load, anything else is refused."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nemo_rl_lite.errors import CheckpointError

# The file name that torch.distributed.checkpoint uses.
INDEX_FILE = ".metadata"
# torch.distributed.checkpoint reads other objects than tensors with weights_only=False; this overrides it.
_TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    *((_METADATA, name) for name in _RECORDS),
}
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


@contextmanager
def reading_only(folder: Path) -> Iterator[None]:
    """Let megatron-core and torch read the checkpoint in `folder` within the block, without running code from it.

    Raises:
        CheckpointError: there is no index, or it names an object that no index needs.
    """
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            _IndexOnly(file).load()
    except Exception as error:  # a damaged pickle may ask for anything, such as more memory than there is
        raise CheckpointError(f"{path} is not a checkpoint's index: {error}") from error
    before = os.environ.get(_TENSORS_ONLY)
    os.environ[_TENSORS_ONLY] = "1"
    try:
        yield
    finally:
        del os.environ[_TENSORS_ONLY]
        if before is not None:
            os.environ[_TENSORS_ONLY] = before


class _IndexOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_constant = module == "torch" and isinstance(getattr(torch, name, None), _CONSTANTS)
        if is_constant or (module, name) in _NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
