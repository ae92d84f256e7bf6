"""GPU memory of another process: where a tensor's lies, and opening it there, by CUDA's driver.

torch's own way to share a tensor keeps the memory from being freed until a counter of its own says that nobody reads
it, and can be used once a tensor. Weights are lent anew at each refit, and whoever lends them waits for the end of it.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_byte * _HANDLE_BYTES)]


def allocation(tensor: Tensor) -> int:
    """Address of the allocation that a CUDA tensor's first element is in. Raises RefitError: none of CUDA's own."""
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(tensor.data_ptr()))
    return begin.value


def handle(address: int) -> bytes:
    """What another process needs to open the allocation at `address`.

    Raises:
        RefitError: memory that cannot be shared, as that of torch's expandable segments.
    """
    made = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(made), ctypes.c_uint64(address))
    return bytes(made)


@contextmanager
def opened(handles: Iterable[bytes]) -> Iterator[dict[bytes, int]]:
    """The addresses, in this process, of other processes' allocations on GPUs of this machine, until the block ends.

    Raises:
        RefitError: the other process is gone, or cannot be reached from here.
    """
    addresses = dict[bytes, int]()
    # All are closed, also where one cannot be.
    with ExitStack() as opened_here:
        for one in handles:
            address = ctypes.c_uint64()
            given = _Handle.from_buffer_copy(one)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
            opened_here.callback(_call, "cuIpcCloseMemHandle", address)
            addresses[one] = address.value
        yield addresses


def tensor_at(address: int, nbytes: int) -> Tensor:
    """uint8 [nbytes] for the current device, which may read it over a link; does not keep the memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    # Ways that ask the driver whose memory it is find a GPU that need not be visible here.
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


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
