"""torch internals: foreach copies, storages, dispatch, pinned memory, NCCL's groups."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

# Intercepts every operation of a block, below autograd.
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401
from torch.utils._pytree import tree_leaves

from nemo_rl_lite.compat.versions import written_for

written_for(__name__, "torch", "2.11", "2.13")

# One call for many tensors.
foreach_copy, foreach_mul = torch._foreach_copy_, torch._foreach_mul_


def storage_id(of: Tensor | UntypedStorage) -> int:
    """Return a number that identifies a storage, also after its memory is freed."""
    return (of.untyped_storage() if isinstance(of, Tensor) else of)._cdata


def storage_at(address: int, device: torch.device, nbytes: int) -> Any:
    """Return a storage over GPU memory that it does not own.

    Other constructors ask the driver for the device, which may not be visible to this process.
    """
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


def written_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that a dispatched operation writes to."""
    for index, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tree_leaves(given)


def share_cuda_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Return the arguments of one `open_cuda_tensor` in another process."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)


def open_cuda_tensor(shared: tuple[Any, ...]) -> Tensor:
    """Open another process's tensor on the current device, which may have another number there."""
    rebuild, arguments = shared
    named = inspect.signature(rebuild).bind(*arguments).arguments
    return rebuild(**{**named, "storage_device": torch.cuda.current_device()})


def free_host_cache() -> None:
    """Free torch's cache of pinned memory."""
    torch._C._host_emptyCache()


def nccl_options(timeout: timedelta) -> Any:
    """Return the options of an NCCL group whose operations fail after `timeout`."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def nccl_backends() -> list[Any]:
    """Return the NCCL backends of this process's groups in torch.distributed; empty for gloo's groups. Another thread
    may create groups meanwhile."""
    kind, device, found = getattr(dist, "ProcessGroupNCCL", ()), torch.device("cuda"), list[Any]()
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # it has no backend for GPUs
            found.append(group._get_backend(device))
    return [one for one in found if isinstance(one, kind)]


def nccl_error(backend: Any) -> str:
    """Return what NCCL's watchdog has found: "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR", or "" without an error."""
    found = backend.get_error().name
    return "" if found == "SUCCESS" else found


def tensor_within(content: Any) -> Tensor:
    """Return the tensor that `torch.save` wrote into `content`, an `mmap.mmap`, without copying its elements."""
    # On "meta" torch reads only the description of the tensor and the place of its elements.
    described = torch.load(content, map_location="meta", weights_only=True)
    storage = described.untyped_storage()
    begin = storage._checkpoint_offset
    elements = torch.frombuffer(content, dtype=torch.uint8)[begin : begin + storage.nbytes()].view(described.dtype)
    first = elements.storage_offset() + described.storage_offset()
    return elements.as_strided(described.size(), described.stride(), first)
