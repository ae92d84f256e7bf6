"""Move an optimizer's states between the device and the host."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Move:
    """What a move did: bytes that changed place (0 where they were there already) and seconds it took."""

    nbytes: int
    seconds: float


def move_optimizer_states(optimizers: Iterable[torch.optim.Optimizer], device: str) -> Move:
    """Move every tensor of the optimizers' states to `device` ("cpu" or "cuda"); those already there stay as they are.

    Raises:
        ValueError: another device, also where there is nothing to move.
    """
    if device not in DEVICES:
        raise ValueError(f"optimizer states can go to {' or '.join(DEVICES)}, not to {device!r}")
    started = time.perf_counter()
    moved = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            moved += _move(state, device)
    return Move(moved, time.perf_counter() - started)


def _move(state: dict[str, Any], device: str) -> int:
    moved = 0
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device.type != device:
            state[name] = value.to(device)
            moved += value.nbytes
    return moved
