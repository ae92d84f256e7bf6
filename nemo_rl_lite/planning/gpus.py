"""The memory of a GPU: this machine's, by name, or as given."""

import re

from nemo_rl_lite.host.devices import gpu_bytes

_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
# memory.total of nvidia-smi, in MiB; those of the H100 and the H200 were read on one.
KNOWN = {
    "H100": 81559,
    "H200": 143771,
    "A100-80GB": 81920,
    "A100-40GB": 40960,
    "B200": 183359,
    "L40S": 46068,
    "RTX4090": 24564,
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
        return ("this machine's GPU", found) if found else (f"{ASSUMED} (none is here)", KNOWN[ASSUMED] * 2**20)
    for name, mib in KNOWN.items():
        if gpu.lower() == name.lower():
            return name, mib * 2**20
    try:
        return f"a GPU of {gpu}", parse_size(gpu)
    except ValueError:
        raise ValueError(f"'{gpu}' is neither a known GPU ({', '.join(KNOWN)}) nor a size such as 80GiB") from None
