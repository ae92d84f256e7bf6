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
        # What has one place throughout, such as the states of an optimizer on the CPU, is nothing to move.
        self._stays = {
            component
            for component in self._movable
            if len({residency.place(phase, component) for phase in residency.phases}) == 1
        }
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
        makes_room = self._residency.engines_share_device and phase in (Phase.GENERATE, Phase.REFIT)
        in_background = beside is not None and self._fits(beside)
        if makes_room and in_background:
            # Giving memory back waits for all copies, so it comes before them.
            self._trim()
        for own in self._going_to(Place.HOST, phase):
            own.leave()
        if not in_background:
            self.settle()
        returning = self._going_to(Place.DEVICE, phase)
        for own in returning:
            own.come_back()
        for own in returning:
            own.settle()
        if places[Component.GRADIENTS] is Place.DEVICE:
            self.gradients.bring_back()
        if makes_room and not in_background:
            self._trim()

    def between_micro_batches(self, before: Phase, working_bytes: int) -> Callable[[int], None] | None:
        """What to call before each micro-batch of the work that comes before the phase `before`: frees what has left by
        then, and brings back beside the last micro-batches what that phase will want, if it fits with the
        `working_bytes` that the work takes. None where moves come one after the other."""
        if not self._overlap:
            return None
        wanted = self._going_to(Place.DEVICE, before)

        def begin() -> None:
            for own in wanted:
                if own.on_host and self._fits(own.host_bytes() + working_bytes):
                    _try_to_return(own)

        prefetch = Prefetch(sum(own.seconds_to_return() for own in wanted), begin)

        def call(remaining: int) -> None:
            for own in self._movable.values():
                own.settle_if_done()
            prefetch(remaining)

        return call

    def settle(self) -> None:
        """Wait for everything that moves."""
        for own in self._movable.values():
            own.settle()

    def require(self, *components: Component) -> None:
        """Raises RuntimeError where one of them is not on the device."""
        for component in components:
            own = self._movable[component]
            if component not in self._stays and (own.on_host or own.moving):
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

    def _going_to(self, place: Place, phase: Phase) -> list[Movable]:
        places = self._residency.policy_places(phase)
        return [own for part, own in self._movable.items() if places[part] is place and part not in self._stays]

    def _fits(self, nbytes: int) -> bool:
        return self._overlap and self._free_bytes() - nbytes > self._margin


def _try_to_return(own: Movable) -> None:
    try:
        own.come_back()
    except torch.OutOfMemoryError:
        log.info("no room to bring %s back early", own.name)
