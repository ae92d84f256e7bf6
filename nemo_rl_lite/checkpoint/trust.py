"""The index of a distributed checkpoint is a pickle, which could run anything: what it names is looked at first."""

import pickle
from pathlib import Path
from typing import Any

import torch

from nemo_rl_lite.errors import CheckpointError

# Where torch.distributed.checkpoint keeps it.
INDEX_FILE = ".metadata"
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}
_RECORDS = "torch.distributed.checkpoint.metadata"
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def check_index(folder: Path) -> None:
    """Raises CheckpointError: there is no index, or it names something that is not part of one."""
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            _IndexOnly(file).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint's index: {error}") from error


class _IndexOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_constant = module == "torch" and isinstance(getattr(torch, name, None), _CONSTANTS)
        if is_constant or (module, name) in _NAMES or (module == _RECORDS and "." not in name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
