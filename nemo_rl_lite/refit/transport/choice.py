"""Which transport a producer takes."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["direct", "shared", "broadcast"]


@dataclass(frozen=True)
class Facts:
    """What the choice depends on, the same on all ranks of the policy. The last two are known once the ranks have
    looked, which they do only where the choice would be `direct` if both were true."""

    shares_device: bool
    """Whether each engine rank is on the device of its policy rank."""
    on_gpu: bool
    direct: bool
    """The key `refit.direct`."""
    has_recipe: bool
    """Whether the export is known to only move elements."""
    one_machine: bool = True
    """Whether the ranks that need each other's parameters are on one machine."""
    memory_opens: bool = True
    """Whether these ranks can open one another's memory."""


def choose_transport(facts: Facts) -> Kind:
    """`direct` if engines can copy parameters, else `shared` on a shared device, else `broadcast`."""
    if not facts.shares_device:
        return "broadcast"
    can_copy = facts.on_gpu and facts.has_recipe and facts.one_machine and facts.memory_opens
    return "direct" if facts.direct and can_copy else "shared"
