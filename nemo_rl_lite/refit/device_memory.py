"""GPU memory shared between processes by CUDA's driver.

torch shares a tensor once, and keeps its memory until no process reads it. Refits share weights repeatedly, and the
sharing rank waits for the end of the refit.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import storage_at
from nemo_rl_lite.errors import RefitError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_byte * _HANDLE_BYTES)]


def allocation(address: int) -> tuple[int, int]:
    """Return the address and bytes of the allocation around `address`. Raises RefitError: CUDA did not allocate it."""
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address))
    return begin.value, size.value


def handle(address: int) -> bytes:
    """Return a handle with which another process opens the allocation at `address`. Raises RefitError: it cannot be
    shared, as with torch's expandable segments."""
    made = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(made), ctypes.c_uint64(address))
    return bytes(made)


@contextmanager
def opened(handles: Iterable[bytes]) -> Iterator[dict[bytes, int]]:
    """Open other processes' allocations on this machine's GPUs; yield their addresses in this process by handle. Raises
    RefitError: the other process is gone or unreachable."""
    addresses = dict[bytes, int]()
    with ExitStack() as opened_here:
        for one in handles:
            address = ctypes.c_uint64()
            given = _Handle.from_buffer_copy(one)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
            opened_here.callback(_call, "cuIpcCloseMemHandle", address)
            addresses[one] = address.value
        yield addresses


def tensor_at(address: int, nbytes: int) -> Tensor:
    """Return a tensor, uint8 [nbytes], on the current device, which may read it over a link. It does not own the
    memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage_at(address, device, nbytes))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: object) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        cause = (name.value or b"unknown error").decode()
        raise RefitError(f"{function}: {cause}, where policy and engine share GPU memory")
