"""What passes leave behind on the device. Small as it is, it keeps large segments of torch's cache from being freed: a
tensor of 2 MiB can lie in the segment of several GiB that gradients have left."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nemo_rl_lite.policy.megatron.model import MegatronModel

log = logging.getLogger(__name__)

# Segments below this size are not worth a line of the log.
LARGE_BYTES = 256 << 20
GIB, MIB = 2**30, 2**20


def forget(model: MegatronModel) -> None:
    """Empty the caches of modules such as rotary embeddings, which keep results by their arguments, and drop the last
    input of a pipeline stage."""
    for chunk in model.bare_chunks:
        chunk.set_input_tensor([None])
    kinds = {type(module) for chunk in model.bare_chunks for module in chunk.modules()}
    for cached in (kind.forward for kind in kinds if hasattr(kind.forward, "cache_clear")):
        cached.cache_clear()


class HeldSegments:
    """Says once in the log which large segments of torch's cache stay when it is emptied to make room for others."""

    def __init__(self) -> None:
        self._said = False

    def report(self) -> None:
        """Call this after torch's cache has been emptied."""
        if self._said or torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < LARGE_BYTES // 2:
            return
        text = mostly_empty(torch.cuda.memory_snapshot())
        if text is not None:
            self._said = True
            log.info("%s", text)


def mostly_empty(segments: Iterable[Mapping[str, Any]]) -> str | None:
    """A sentence about the large segments, of `torch.cuda.memory_snapshot`, of which less than half is in use; None
    where there are none."""
    sizes = [(one["total_size"], one["allocated_size"]) for one in segments]
    held = [(total, used) for total, used in sizes if total >= LARGE_BYTES and 2 * used < total]
    if not held:
        return None
    total, used = (sum(column) for column in zip(*held, strict=True))
    largest, part = max(held)
    return (
        f"torch's cache keeps {total / GIB:.2f} GiB that engines could use, because {used / MIB:.1f} MiB in "
        f"{len(held)} segments are in use; the largest has {largest / GIB:.2f} GiB, of which {part / MIB:.1f} MiB are "
        "in use"
    )
