"""A script, run in a process of its own: asks the CUDA driver, without torch, for its version, whether it starts, and
which GPUs may read each other's memory. Prints JSON; GPUs are numbered as nvidia-smi does."""

import ctypes
import json
import sys


def probe() -> dict[str, object]:
    """`version`: 13000 for CUDA 13.0. `error`: why it does not start, or empty. `peers`: for each GPU, whether it may
    read each GPU's memory."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"version": 0, "error": str(error), "peers": []}
    version = ctypes.c_int(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    status = cuda.cuInit(0)
    if status:
        return {"version": version.value, "error": _describe(cuda, status), "peers": []}
    count = ctypes.c_int(0)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    devices = [ctypes.c_int(0) for _ in range(count.value)]
    for number, device in enumerate(devices):
        cuda.cuDeviceGet(ctypes.byref(device), number)
    peers = [[one is other or _can_read(cuda, one, other) for other in devices] for one in devices]
    return {"version": version.value, "error": "", "peers": peers}


def _can_read(cuda: ctypes.CDLL, one: ctypes.c_int, other: ctypes.c_int) -> bool:
    allowed = ctypes.c_int(0)
    return cuda.cuDeviceCanAccessPeer(ctypes.byref(allowed), one, other) == 0 and bool(allowed.value)


def _describe(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(status, ctypes.byref(text))
    words = text.value.decode() if text.value else "unknown error"
    return f"error {status}: {words}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
