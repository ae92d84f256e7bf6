"""A distributed checkpoint has pickles in it, which could run anything: torch is let read them, but nothing run."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nemo_rl_lite.errors import CheckpointError

# Where torch.distributed.checkpoint keeps it.
INDEX_FILE = ".metadata"
# torch.distributed.checkpoint reads what is no tensor with weights_only=False; this overrules it.
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
    """Within the block, megatron-core and torch can read the checkpoint in `folder`, and nothing in it can run.

    Raises:
        CheckpointError: there is no index, or it names something that is not part of one.
    """
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            _IndexOnly(file).load()
    except (
        OSError,
        EOFError,
        pickle.UnpicklingError,
        AttributeError,
        ImportError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
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
