"""The memory and the speed of a GPU: this machine's, by name, or as given."""

import re
from dataclasses import dataclass

from nemo_rl_lite.system.machine import gpu_bytes

_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: memory in MiB (`memory.total` of nvidia-smi), dense FLOP/s in bfloat16, bytes/s of its memory."""

    mib: int
    flops: float
    bandwidth: float


# Memory of the H100 and the H200 was read on one; the rest, and both rates, are the vendor's figures.
KNOWN = {
    "H100": Gpu(81559, 989e12, 3.35e12),
    "H200": Gpu(143771, 989e12, 4.8e12),
    "A100-80GB": Gpu(81920, 312e12, 2.04e12),
    "A100-40GB": Gpu(40960, 312e12, 1.56e12),
    "B200": Gpu(183359, 2250e12, 8e12),
    "L40S": Gpu(46068, 362e12, 0.86e12),
    "RTX4090": Gpu(24564, 165e12, 1.01e12),
}
# What nvidia-smi calls them. Others of the same family, such as an H100 on PCIe, have other rates.
_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA B200": "B200",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX4090",
}
ASSUMED = "H100"


def parse_size(text: str) -> int:
    """Parse a size such as `80GiB` or `1.5 TB` to bytes. Raises ValueError: it is not a size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b)\s*", text.lower())
    if found is None or not float(found[1]):
        raise ValueError(f"'{text}' is not a size: give a number and a unit, such as 80GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def size_of(gpu: str | None) -> tuple[str, int]:
    """Return the name and bytes of `gpu` (a name or a size), or of this machine's smallest GPU, or of an `ASSUMED` one.

    Raises:
        ValueError: `gpu` is neither.
    """
    if gpu is None:
        found = gpu_bytes()
        return ("this machine's GPU", found) if found else (f"{ASSUMED} (none is here)", KNOWN[ASSUMED].mib * 2**20)
    for name, known in KNOWN.items():
        if gpu.lower() == name.lower():
            return name, known.mib * 2**20
    try:
        return f"a GPU of {gpu}", parse_size(gpu)
    except ValueError:
        raise ValueError(f"'{gpu}' is neither a known GPU ({', '.join(KNOWN)}) nor a size such as 80GiB") from None


def speed_of(gpu_bytes: int) -> tuple[str, Gpu]:
    """Return the name and the rates of the known GPU whose memory is nearest to `gpu_bytes`."""
    name = min(KNOWN, key=lambda one: abs(KNOWN[one].mib * 2**20 - gpu_bytes))
    return name, KNOWN[name]


def known_by_name(name: str | None) -> Gpu | None:
    """Return the GPU that nvidia-smi calls `name`; None for an unknown one."""
    return KNOWN[_NAMES[name]] if name in _NAMES else None
