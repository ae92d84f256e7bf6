"""Brings parameters, gradients and optimizer states to where the residency table has them in each phase."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from nemo_rl_lite.offload.gradients import GradientBuffers
from nemo_rl_lite.offload.mover import Movable, Move
from nemo_rl_lite.offload.prefetch import Prefetch
from nemo_rl_lite.offload.residency import Component, Phase, Place, Residency

log = logging.getLogger(__name__)

# The share of the device that a move beside other work leaves free for that work's ups and downs.
MARGIN = 0.05
GIB = 2**30


class DeviceMemory(Protocol):
    """The device's memory, as this process sees it, in bytes."""

    total: int

    def free_here(self) -> int:
        """What this process could take, that included which torch keeps for later."""
        ...

    def free_elsewhere(self) -> int:
        """What another process could take."""
        ...

    def trim(self) -> None:
        """Hand what torch keeps for later to other processes. Waits for everything that runs on the device."""
        ...


class PhaseMemory:
    """Where this rank's policy is. `enter` is idempotent; after an error in it, it can be called again."""

    def __init__(
        self,
        residency: Residency,
        parameters: Movable,
        optimizer_states: Movable,
        gradients: GradientBuffers,
        overlap: bool,
        device: DeviceMemory,
    ):
        self._residency, self._overlap, self._device = residency, overlap, device
        self._movable = {Component.PARAMETERS: parameters, Component.OPTIMIZER_STATES: optimizer_states}
        # What has one place throughout, such as the states of an optimizer on the CPU, is nothing to move.
        self._stays = {
            component
            for component in self._movable
            if len({residency.place(phase, component) for phase in residency.phases}) == 1
        }
        self.gradients = gradients
        self._refused: set[str] = set()

    def enter(self, phase: Phase, beside: int | None = None) -> None:
        """Move what `phase` wants elsewhere. With `beside`, what leaves may still be leaving when this returns, if so
        many bytes of the device are free meanwhile: for the engine, where the phase makes room for it, and otherwise
        for this process. The next `enter` waits for it.

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
        if makes_room:
            # Before copies are on their way, since it would wait for them.
            self._device.trim()
        leaving, returning = self._going_to(Place.HOST, phase), self._going_to(Place.DEVICE, phase)
        in_background = False
        if leaving and self._overlap and beside is not None:
            in_background = self._fits(phase, beside, returning, makes_room)
        for own in leaving:
            own.leave()
        if not in_background:
            self.settle()
        self._bring_back(returning)
        if places[Component.GRADIENTS] is Place.DEVICE:
            self.gradients.bring_back()
        if makes_room and leaving and not in_background:
            self._device.trim()

    def between_micro_batches(
        self, before: Phase, working_bytes: int | None, around: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[int], None] | None:
        """What to call before each micro-batch of work before the phase `before`: frees what has left by then and, with
        the `working_bytes` that the work takes, brings back beside the last micro-batches what that phase will want,
        where it fits, both within `around()`. None where moves come one after the other."""
        if not self._overlap:
            return None
        wanted = self._going_to(Place.DEVICE, before) if working_bytes is not None else []

        def begin() -> None:
            absent = [own for own in wanted if own.on_host]
            if absent and self._fits(before, working_bytes or 0, absent, for_others=False):
                with around():
                    for own in absent:
                        _try_to_return(own)

        prefetch = Prefetch(sum(own.seconds_to_return() for own in wanted), begin)

        def call(remaining: int) -> None:
            moved = [own for own in self._movable.values() if own.moved]
            if moved:
                with around():
                    for own in moved:
                        own.settle()
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

    def recount(self) -> None:
        """To be called when the optimizer may have made states."""
        for own in self._movable.values():
            own.recount()

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

    def _bring_back(self, returning: list[Movable]) -> None:
        for own in returning:
            try:
                own.come_back()
            except torch.OutOfMemoryError:
                if not any(other.moving for other in self._movable.values()):
                    raise
                # What is still leaving takes the room.
                self.settle()
                own.come_back()
        for own in returning:
            own.settle()

    def _fits(self, phase: Phase, working_bytes: int, returning: list[Movable], for_others: bool) -> bool:
        """Whether work that takes so many bytes can go on beside a move, with these coming back."""
        free = self._device.free_elsewhere() if for_others else self._device.free_here()
        needed = working_bytes + sum(own.host_bytes() for own in returning)
        margin = int(MARGIN * self._device.total)
        if free - needed > margin:
            return True
        if phase.value not in self._refused:
            self._refused.add(phase.value)
            log.info(
                "moves for the %s phase come one after the other at least once: beside the work they would need %.2f "
                "GiB, %.2f are free and %.2f stay free",
                phase.value,
                needed / GIB,
                free / GIB,
                margin / GIB,
            )
        return False


def _try_to_return(own: Movable) -> None:
    try:
        own.come_back()
    except torch.OutOfMemoryError:
        log.info("no room to bring %s back early", own.name)
