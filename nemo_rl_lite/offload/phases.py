"""Brings parameters, gradients and optimizer states to where the residency table has them in each phase."""

import logging
from collections.abc import Callable

import torch

from nemo_rl_lite.offload.gradients import GradientBuffers
from nemo_rl_lite.offload.mover import Movable, Move
from nemo_rl_lite.offload.prefetch import Prefetch
from nemo_rl_lite.offload.residency import Component, Phase, Place, Residency

log = logging.getLogger(__name__)

# The share of the device that a move beside other work leaves free for that work's ups and downs.
MARGIN = 0.05


class PhaseMemory:
    """Where this rank's policy is. `enter` is idempotent; after an error in it, it can be called again.

    `free_bytes` tells how much device memory could be taken now and `trim` hands what torch keeps for later to other
    processes; `total_bytes` is the device's size.
    """

    def __init__(
        self,
        residency: Residency,
        parameters: Movable,
        optimizer_states: Movable,
        gradients: GradientBuffers,
        overlap: bool,
        total_bytes: int,
        free_bytes: Callable[[], int],
        trim: Callable[[], None],
    ):
        self._residency, self._overlap = residency, overlap
        self._movable = {Component.PARAMETERS: parameters, Component.OPTIMIZER_STATES: optimizer_states}
        self.gradients = gradients
        self._margin = int(MARGIN * total_bytes)
        self._free_bytes, self._trim = free_bytes, trim

    def enter(self, phase: Phase, beside: int | None = None) -> None:
        """Move what `phase` wants elsewhere. With `beside`, what leaves may still be leaving when this returns, if so
        many bytes of the device are free meanwhile; the next `enter` waits for it.

        Raises:
            ValueError: no such phase in this run.
            RuntimeError: gradients would be dropped while they accumulate.
            HostMemoryError, torch.OutOfMemoryError: no room; what could not move is where it was.
        """
        places = self._residency.policy_places(Phase(phase))
        self.settle()
        if places[Component.GRADIENTS] is not Place.DEVICE:
            self.gradients.drop()
        for component, own in self._movable.items():
            if places[component] is Place.HOST:
                own.leave()
        if beside is None or not self._fits(beside):
            self.settle()
        returning = [own for component, own in self._movable.items() if places[component] is Place.DEVICE]
        for own in returning:
            own.come_back()
        for own in returning:
            own.settle()
        if places[Component.GRADIENTS] is Place.DEVICE:
            self.gradients.bring_back()
        if self._residency.engines_share_device and phase in (Phase.GENERATE, Phase.REFIT):
            self._trim()

    def prefetch(self, phase: Phase, working_bytes: int) -> Prefetch | None:
        """What to call before each micro-batch of the work that comes before `phase`, so that what `phase` will want
        comes back beside the last ones; None where nothing will. It begins only where it fits with the `working_bytes`
        that the work takes. `enter` waits for it."""
        places = self._residency.policy_places(phase)
        absent = [own for part, own in self._movable.items() if places[part] is Place.DEVICE and own.on_host]
        if not self._overlap or not absent:
            return None

        def begin() -> None:
            for own in absent:
                if self._fits(own.parked_bytes() + working_bytes):
                    _try_to_return(own)

        return Prefetch(sum(own.seconds_to_return() for own in absent), begin)

    def settle(self) -> None:
        """Wait for everything that moves."""
        for own in self._movable.values():
            own.settle()

    def require(self, *components: Component) -> None:
        """Raises RuntimeError where one of them is not on the device."""
        for component in components:
            own = self._movable[component]
            if own.on_host or own.moving:
                raise RuntimeError(
                    f"{component.value} are not on the device in this phase: a prepare_for_... is missing"
                )

    def device_bytes(self) -> dict[str, int]:
        """Bytes that each component takes of the device now, by the component's name."""
        held = {component.value: own.device_bytes() for component, own in self._movable.items()}
        return held | {Component.GRADIENTS.value: self.gradients.device_bytes()}

    def take_moves(self) -> list[tuple[str, Move]]:
        """What has moved since the last call."""
        return [move for own in self._movable.values() for move in own.take_moves()]

    def release(self) -> None:
        """Give host memory back; everything must be on the device."""
        for own in self._movable.values():
            own.release()

    def _fits(self, nbytes: int) -> bool:
        return self._overlap and self._free_bytes() - nbytes > self._margin


def _try_to_return(own: Movable) -> None:
    try:
        own.come_back()
    except torch.OutOfMemoryError:
        log.info("no room to bring %s back early", own.name)
