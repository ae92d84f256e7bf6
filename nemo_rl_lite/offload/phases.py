"""Moves of a policy's parameters, gradients and optimizer states to their places in the residency table."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import storage_id
from nemo_rl_lite.offload.mover import Movable, Move
from nemo_rl_lite.offload.residency import Component, Phase, Place, Residency

log = logging.getLogger(__name__)

# An overlapped move leaves this share of the device free for fluctuations of the work that it overlaps with.
MARGIN = 0.05
GIB = 2**30


class GradientBuffers:
    """Gradients, whose memory is freed between accumulations and allocated again as zeros. Views of them survive."""

    def __init__(self, buffers: Sequence[Tensor]):
        self._buffers = list(buffers)
        self._sizes = [buffer.untyped_storage().nbytes() for buffer in buffers]
        self._accumulating = False
        self._dropped = False

    def device_bytes(self) -> int:
        """Return the bytes of device memory that the buffers take now."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients from being dropped within the block, while they accumulate.

        Raises:
            RuntimeError: the buffers have no memory.
        """
        if self._dropped:
            raise RuntimeError("gradients have no memory in this phase: prepare_for_training comes before train")
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def drop(self) -> None:
        """Free the memory, if there is any.

        Raises:
            RuntimeError: gradients are being accumulated.
        """
        if self._accumulating:
            raise RuntimeError("gradients are being accumulated and must not be dropped")
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)
        self._dropped = True

    def bring_back(self) -> None:
        """Allocate the memory again, filled with zeros, unless the buffers have it."""
        if not self._dropped:
            return
        for buffer, nbytes in zip(self._buffers, self._sizes, strict=True):
            buffer.untyped_storage().resize_(nbytes)
            buffer.zero_()
        self._dropped = False


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer], model: Iterable[Tensor]) -> list[Tensor]:
    """Return the optimizers' states and master weights. An optimizer without master weights steps tensors that share
    memory with `model`, which are left out."""
    shared, found = {storage_id(tensor) for tensor in model}, list[Tensor]()
    for optimizer in optimizers:
        found += [weight for group in optimizer.param_groups for weight in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values()]
        found += [value for value in states if isinstance(value, Tensor)]
    return [tensor for tensor in found if storage_id(tensor) not in shared]


class Prefetch:
    """Start of a transfer beside the last micro-batches. Called before each micro-batch, it calls `begin` once the
    remaining ones take about as long as the transfer, at the pace so far, and before the last one at the latest."""

    def __init__(self, transfer_s: float, begin: Callable[[], None]):
        self._transfer_s, self._begin = transfer_s, begin
        self._first: tuple[float, int] | None = None

    def __call__(self, remaining: int, running: int = 0) -> None:
        """Call `begin` if it is time. `remaining`: micro-batches that have not begun, the next one included.
        `running`: those that have begun and may still run; the transfer waits for them, because it takes memory that
        they may use."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now, remaining
        began, count = self._first
        done = count - remaining - running
        seconds_left = remaining * (now - began) / done if done > 0 else float("inf")
        if remaining == 1 or seconds_left <= self._transfer_s:
            self._begin()


class DeviceMemory(Protocol):
    """The device's memory, as this process sees it, in bytes."""

    total: int

    def free_here(self) -> int:
        """Return the bytes that this process could allocate, torch's cache included."""
        ...

    def free_elsewhere(self) -> int:
        """Return the bytes that another process could allocate."""
        ...

    def trim(self) -> None:
        """Free torch's cache for other processes. Waits for all work on the device."""
        ...


class PhaseMemory:
    """Moves this rank's policy between phases. `enter` is idempotent and can be called again after an error."""

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
        # A component with one place in all phases, such as the states of an optimizer on the CPU, never moves.
        self._stays = {
            component
            for component in self._movable
            if len({residency.place(phase, component) for phase in residency.phases}) == 1
        }
        self.gradients = gradients
        self._refused: set[str] = set()

    def enter(self, phase: Phase, working_bytes: int | None = None, later: Collection[Component] = ()) -> None:
        """Move components to their places in `phase`.

        With `working_bytes`, moves to the host may still run when this returns, if that many bytes of the device are
        free meanwhile: for the engine, where the phase makes room for it, and otherwise for this process. The next
        `enter` waits for them. Components in `later` may still be coming back when this returns, where moves overlap
        with work: `arrive` waits for them.

        Raises:
            ValueError: no such phase in this run.
            RuntimeError: gradients would be dropped while they accumulate.
            HostMemoryError, torch.OutOfMemoryError: memory is short; a component that could not move is where it was.
        """
        places = self._residency.policy_places(Phase(phase))
        waiting = [self._movable[component] for component in later] if self._overlap else []
        leaving, returning = self._going_to(Place.HOST, phase), self._going_to(Place.DEVICE, phase)
        coming = [own for own in returning if own in waiting and own.returning]
        for own in self._movable.values():
            if own not in coming:
                own.synchronize(alone=True)
        if places[Component.GRADIENTS] is not Place.DEVICE:
            self.gradients.drop()
        makes_room = self._residency.engines_sleep and phase in (Phase.GENERATE, Phase.REFIT)
        if makes_room:
            # Trim before copies are in flight, because trimming would wait for them.
            self._device.trim()
        in_background = False
        if leaving and self._overlap and working_bytes is not None:
            in_background = self._fits(phase, working_bytes, returning, makes_room)
        for own in leaving:
            own.leave()
        if not in_background:
            for own in leaving:
                own.synchronize(alone=True)
        now = [own for own in returning if own not in waiting]
        self._begin_to_return(now)
        for own in now:
            own.synchronize(alone=True)
        self._begin_to_return([own for own in returning if own in waiting and own not in coming])
        if places[Component.GRADIENTS] is Place.DEVICE:
            self.gradients.bring_back()
        if makes_room and leaving and not in_background:
            self._device.trim()

    def between_micro_batches(
        self, before: Phase, working_bytes: int | None, around: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[int, int], None] | None:
        """Return a function to call before each micro-batch of the work before the phase `before`; None if moves do not
        overlap.

        Its arguments are the numbers of micro-batches that have not begun, and that may still run. It frees
        components that have left. Given the `working_bytes` of the work, it brings back the phase's components beside
        the last micro-batches, if they fit. Both happen within `around()`.
        """
        if not self._overlap:
            return None
        wanted = self._going_to(Place.DEVICE, before) if working_bytes is not None else []

        def begin() -> None:
            absent = [own for own in wanted if own.on_host]
            if absent and self._fits(before, working_bytes or 0, absent, for_others=False):
                with around():
                    for own in absent:
                        try:
                            own.come_back()
                        except torch.OutOfMemoryError:
                            log.info("no room to bring %s back early", own.name)

        prefetch = Prefetch(sum(own.seconds_to_return() for own in wanted), begin)

        def call(remaining: int, running: int) -> None:
            moved = [own for own in self._movable.values() if own.moved]
            if moved:
                with around():
                    for own in moved:
                        own.synchronize()
            prefetch(remaining, running)

        return call

    def synchronize(self) -> None:
        """Wait for all moves in flight."""
        for own in self._movable.values():
            own.synchronize()

    def require(self, *components: Component) -> None:
        """Check that the components are on the device. Raises RuntimeError: a component is not."""
        for component in components:
            own = self._movable[component]
            if component not in self._stays and (own.on_host or own.moving):
                raise RuntimeError(
                    f"{component.value} are not on the device in this phase: a prepare_for_... is missing"
                )

    def expect(self, component: Component) -> None:
        """Check that the component is on the device or on its way there. Raises RuntimeError otherwise."""
        if not self._movable[component].returning:
            self.require(component)

    def arrive(self, component: Component) -> None:
        """Wait until the component is on the device. Raises RuntimeError if it is not on its way there."""
        self._movable[component].synchronize()
        self.require(component)

    def recount(self) -> None:
        """Count bytes again, because the optimizer may have made states."""
        for own in self._movable.values():
            own.recount()

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes of the device that each component takes now, by the component's name."""
        held = {component.value: own.device_bytes() for component, own in self._movable.items()}
        return held | {Component.GRADIENTS.value: self.gradients.device_bytes()}

    def pop_moves(self) -> list[tuple[str, Move]]:
        """Return the moves that have settled since the last call."""
        return [move for own in self._movable.values() for move in own.pop_moves()]

    def release(self) -> None:
        """Free the host memory. All components must be on the device."""
        for own in self._movable.values():
            own.release()

    def _going_to(self, place: Place, phase: Phase) -> list[Movable]:
        places = self._residency.policy_places(phase)
        return [own for part, own in self._movable.items() if places[part] is place and part not in self._stays]

    def _begin_to_return(self, returning: list[Movable]) -> None:
        for own in returning:
            try:
                own.come_back()
            except torch.OutOfMemoryError:
                if not any(other.moving for other in self._movable.values()):
                    raise
                # Components that are still leaving take the memory.
                self.synchronize()
                own.come_back()

    def _fits(self, phase: Phase, working_bytes: int, returning: list[Movable], for_others: bool) -> bool:
        """Return whether work that takes `working_bytes` can overlap with a move, with `returning` coming back."""
        free = self._device.free_elsewhere() if for_others else self._device.free_here()
        needed = working_bytes + sum(own.host_bytes() for own in returning)
        margin = int(MARGIN * self._device.total)
        if free - needed > margin:
            return True
        if phase.value not in self._refused:
            self._refused.add(phase.value)
            log.info(
                "moves for the %s phase do not overlap with other work at least once: they would need %.2f GiB, "
                "%.2f are free and %.2f stay free",
                phase.value,
                needed / GIB,
                free / GIB,
                margin / GIB,
            )
        return False
