"""Read a distributed checkpoint: each part once in a data-parallel group, verified, and without running code from it.

Ranks of a data-parallel group divide the parts that several of them need. One of these ranks reads a part, compares its
digest, and broadcasts it. torch reads whole parts, so ranks in a different layout from the saved one may read more than
they need.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from nemo_rl_lite.checkpoint.store import Part, digest_of, has_changed, load
from nemo_rl_lite.compat.megatron import PartReader, files_read_by_part, parallel_loading
from nemo_rl_lite.errors import CheckpointError

# torch.distributed.checkpoint's index.
INDEX_FILE = ".metadata"
# Overrides torch.distributed.checkpoint's weights_only=False.
_TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# The names that an index may contain, in addition to torch's constants.
_METADATA = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
    *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
# From torch 2.13 on, also of the ranks' plans.
_PLAN = ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA),
    *(("torch.distributed.checkpoint.planner", name) for name in _PLAN),
}
# Errors from reading a damaged file.
_OF_DAMAGED_FILES = (
    OSError,
    RuntimeError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
    pickle.PickleError,
    CheckpointException,
)


def read_common(folder: Path) -> dict[str, Any]:
    """Return the values in a checkpoint that are equal on all ranks. Raises CheckpointError."""
    from megatron.core import dist_checkpointing

    with _errors_named(folder), _verified(folder):
        return dist_checkpointing.load_common_state_dict(str(folder))


def read_state(sharded: dict[str, Any], folder: Path) -> Any:
    """Read this rank's part of a state, described by `sharded`. Collective. Raises CheckpointError on all ranks."""
    from megatron.core import dist_checkpointing

    with _errors_named(folder), _verified(folder):
        return dist_checkpointing.load(sharded, str(folder), sharded_strategy=parallel_loading(_Together(folder)))


class _Together:
    """Strategy of megatron-core for loading that fails on all ranks if it fails on one, before they exchange."""

    def __init__(self, folder: Path):
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

        self._own, self._folder = TorchDistLoadShardedStrategy(), folder

    def load(self, *arguments: Any) -> Any:
        found, failures = None, [""] * dist.get_world_size()
        try:
            with _errors_named(self._folder):
                found = self._own.load(*arguments)
            failure = ""
        except CheckpointError as error:
            failure = str(error)
        dist.all_gather_object(failures, failure)
        if any(failures):
            raise CheckpointError(next(filter(None, failures)))
        return found


@contextmanager
def _errors_named(folder: Path) -> Iterator[None]:
    """Raise CheckpointError for errors from reading a checkpoint within the block."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        yield
    except (CheckpointingException, *_OF_DAMAGED_FILES) as error:
        # torch collects the errors of all ranks; here each reads alone.
        (cause, _), *_ = [*error.failures.values()] if isinstance(error, CheckpointException) else [(error, None)]
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise CheckpointError(f"the policy cannot be read from {folder}: {first_line(cause)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@contextmanager
def _verified(folder: Path) -> Iterator[None]:
    """Let megatron-core compare the parts of the files in `folder` with their digests as it reads them, and read no
    other objects, within the block."""
    with reading_only(folder) as index, files_read_by_part(index, _verifier(folder)):
        yield


@contextmanager
def reading(folder: Path) -> Iterator[PartReader]:
    """Yield torch's reader of a checkpoint, which compares each part with its digest and reads no other objects within
    the block. Raises CheckpointError for errors in the block."""
    with _errors_named(folder), reading_only(folder) as index:
        yield PartReader(str(folder), index, _verifier(folder))


def _verifier(folder: Path) -> Callable[[str, int, bytes], None]:
    """Return the `verify` of `PartReader`. It raises CheckpointError: a part has changed."""
    recorded = load(folder.parent)
    parts: dict[str, Mapping[int, Part]] = {}
    for name, own in ({} if recorded is None else recorded.parts).items():
        begins = accumulate((length for length, _ in own), initial=0)
        parts[Path(name).name] = {begin: (length, digest) for begin, (length, digest) in zip(begins, own, strict=False)}

    def verify(name: str, begin: int, content: bytes) -> None:
        if name in parts and parts[name].get(begin) != (len(content), digest_of(content)):
            raise has_changed(folder.parent, f"{folder.name}/{name}")

    return verify


@contextmanager
def reading_only(folder: Path) -> Iterator[Any]:
    """Restrict torch and megatron-core to reading tensors and their index from `folder` within the block. Yields the
    index. Raises CheckpointError: there is no index, or it names other objects."""
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            index = _IndexOnly(file).load()
    # A damaged pickle may raise anything.
    except Exception as error:
        raise CheckpointError(f"{path} is not a checkpoint's index: {error}") from error
    before = os.environ.get(_TENSORS_ONLY)
    os.environ[_TENSORS_ONLY] = "1"
    try:
        yield index
    finally:
        del os.environ[_TENSORS_ONLY]
        if before is not None:
            os.environ[_TENSORS_ONLY] = before


class _IndexOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        constants = (torch.dtype, torch.layout, torch.memory_format)
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), constants)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
