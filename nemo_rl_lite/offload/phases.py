"""Move a policy's parameters, gradients and optimizer states to their places in the residency table."""

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

# Share of the device that stays free during an overlapped move, because the other work's memory fluctuates.
MARGIN = 0.05
GIB = 2**30


class GradientBuffers:
    """Gradients, whose memory is freed between accumulations and then allocated as zeros. Views survive."""

    def __init__(self, buffers: Sequence[Tensor]):
        self._buffers = list(buffers)
        self._sizes = [buffer.untyped_storage().nbytes() for buffer in buffers]
        self._accumulating = False
        self._dropped = False

    def device_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Forbid `drop` within the block. Raises RuntimeError: the buffers have no memory."""
        if self._dropped:
            raise RuntimeError("gradients have no memory in this phase: prepare_for_training comes before train")
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def drop(self) -> None:
        """Free the memory. Raises RuntimeError: gradients are being accumulated."""
        if self._accumulating:
            raise RuntimeError("gradients are being accumulated and must not be dropped")
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)
        self._dropped = True

    def allocate(self) -> None:
        """Allocate the memory, filled with zeros, if it was dropped."""
        if not self._dropped:
            return
        for buffer, nbytes in zip(self._buffers, self._sizes, strict=True):
            buffer.untyped_storage().resize_(nbytes)
            buffer.zero_()
        self._dropped = False


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer], model: Iterable[Tensor]) -> list[Tensor]:
    """Return the optimizers' states and master weights, except tensors that share memory with `model`."""
    shared, found = {storage_id(tensor) for tensor in model}, list[Tensor]()
    for optimizer in optimizers:
        found += [weight for group in optimizer.param_groups for weight in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values()]
        found += [value for value in states if isinstance(value, Tensor)]
    return [tensor for tensor in found if storage_id(tensor) not in shared]


class Prefetch:
    """Calls `begin` when the remaining micro-batches take as long as a transfer, at the pace so far, or before the last
    one. Called before each micro-batch."""

    def __init__(self, transfer_s: float, begin: Callable[[], None]):
        self._transfer_s, self._begin = transfer_s, begin
        self._first: tuple[float, int] | None = None

    def __call__(self, remaining: int, running: int = 0) -> None:
        """`remaining`: micro-batches that have not started. `running`: those in flight, whose memory the transfer waits
        for."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now, remaining
        began, count = self._first
        done = count - remaining - running
        seconds_left = remaining * (now - began) / done if done > 0 else float("inf")
        if remaining == 1 or seconds_left <= self._transfer_s:
            self._begin()


class DeviceMemory(Protocol):
    """Memory of the device in bytes."""

    total: int

    def free_here(self) -> int:
        """Return the bytes that this process can allocate, torch's cache included."""

    def free_elsewhere(self) -> int:
        """Return the bytes that another process can allocate."""

    def trim(self) -> None:
        """Free torch's cache for other processes, after all work on the device."""


class PhaseMemory:
    """Moves this rank's policy between phases. `enter` is idempotent and may be repeated after an error."""

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
        # Components with the same place in all phases, such as the states of an optimizer on the CPU.
        phases = residency.phases
        self._stays = {one for one in self._movable if len({residency.place(phase, one) for phase in phases}) == 1}
        self.gradients = gradients
        # Phases for which the log has said that moves do not overlap.
        self._refused: set[str] = set()

    def enter(self, phase: Phase, working_bytes: int | None = None, later: Collection[Component] = ()) -> None:
        """Move components to their places in `phase`.

        With `overlap`, some moves may be in flight when this returns:

        - Offloads, if `working_bytes` of the device are free meanwhile, for the engine if it wakes in this phase, else
          for this process. The next `enter` waits for them.
        - Reloads of components in `later`. `arrive` waits for them.

        Raises:
            ValueError: the run has no such phase.
            RuntimeError: gradients are being accumulated.
            HostMemoryError, torch.OutOfMemoryError: memory is short; a component that could not move is where it was.
        """
        places = self._residency.policy_places(Phase(phase))
        deferred = [self._movable[component] for component in later] if self._overlap else []
        offloading, reloading = self._going_to(Place.HOST, phase), self._going_to(Place.DEVICE, phase)
        in_flight = [own for own in reloading if own in deferred and own.reloading]
        for own in self._movable.values():
            if own not in in_flight:
                own.synchronize(alone=True)
        if places[Component.GRADIENTS] is not Place.DEVICE:
            self.gradients.drop()
        makes_room = self._residency.engines_sleep and phase in (Phase.GENERATE, Phase.REFIT)
        if makes_room:
            # Trimming would wait for copies in flight.
            self._device.trim()
        in_background = False
        if offloading and self._overlap and working_bytes is not None:
            in_background = self._fits(phase, working_bytes, reloading, makes_room)
        for own in offloading:
            own.offload()
        if not in_background:
            for own in offloading:
                own.synchronize(alone=True)
        now = [own for own in reloading if own not in deferred]
        self._begin_reload(now)
        for own in now:
            own.synchronize(alone=True)
        self._begin_reload([own for own in reloading if own in deferred and own not in in_flight])
        if places[Component.GRADIENTS] is Place.DEVICE:
            self.gradients.allocate()
        if makes_room and offloading and not in_background:
            self._device.trim()

    def between_micro_batches(
        self, before: Phase, working_bytes: int | None, around: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[int, int], None] | None:
        """Return a function to call before each micro-batch of the phase that precedes `before`; None without overlap.

        Its arguments are the numbers of micro-batches that have not started, and that are in flight. It frees the
        device memory of finished offloads. Given the `working_bytes` of the work, it starts the reloads for `before`
        during the last micro-batches, if they fit. Both run within `around()`.
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
                            own.reload()
                        except torch.OutOfMemoryError:
                            log.info("no room to reload %s early", own.name)

        prefetch = Prefetch(sum(own.reload_s() for own in wanted), begin)

        def call(remaining: int, running: int) -> None:
            done = [own for own in self._movable.values() if own.done]
            if done:
                with around():
                    for own in done:
                        own.synchronize()
            prefetch(remaining, running)

        return call

    def require(self, component: Component) -> None:
        """Raise RuntimeError if the component is not on the device."""
        own = self._movable[component]
        if component not in self._stays and (own.on_host or own.moving):
            raise RuntimeError(f"{component.value} are not on the device in this phase: a prepare_for_... is missing")

    def expect(self, component: Component) -> None:
        """Raise RuntimeError if the component is neither on the device nor being reloaded."""
        if not self._movable[component].reloading:
            self.require(component)

    def arrive(self, component: Component) -> None:
        """Wait for the component's reload. Raises RuntimeError if it is not on the device then."""
        self._movable[component].synchronize()
        self.require(component)

    def recount(self) -> None:
        """Count bytes again, because tensors may have been added or replaced."""
        for own in self._movable.values():
            own.recount()

    def device_bytes(self) -> dict[str, int]:
        """Return each component's bytes on the device, by name."""
        held = {component.value: own.device_bytes() for component, own in self._movable.items()}
        return held | {Component.GRADIENTS.value: self.gradients.device_bytes()}

    def pop_moves(self) -> list[tuple[str, Move]]:
        """Return the moves finished since the last call."""
        return [move for own in self._movable.values() for move in own.pop_moves()]

    def release(self) -> None:
        """Free the host memory. All components must be on the device."""
        for own in self._movable.values():
            own.release()

    def _going_to(self, place: Place, phase: Phase) -> list[Movable]:
        places = self._residency.policy_places(phase)
        return [own for part, own in self._movable.items() if places[part] is place and part not in self._stays]

    def _begin_reload(self, reloading: list[Movable]) -> None:
        for own in reloading:
            try:
                own.reload()
            except torch.OutOfMemoryError:
                if not any(other.moving for other in self._movable.values()):
                    raise
                # Offloads in flight will free memory.
                for other in self._movable.values():
                    other.synchronize()
                own.reload()

    def _fits(self, phase: Phase, working_bytes: int, reloading: list[Movable], for_others: bool) -> bool:
        """Return whether `working_bytes` of other work fit on the device during a move, next to `reloading`."""
        free = self._device.free_elsewhere() if for_others else self._device.free_here()
        needed = working_bytes + sum(own.host_bytes() for own in reloading)
        margin = int(MARGIN * self._device.total)
        if free - needed > margin:
            return True
        if phase.value not in self._refused:
            self._refused.add(phase.value)
            log.info(
                "moves for the %s phase do not always overlap with other work: they need %.2f GiB, %.2f GiB are free, "
                "%.2f GiB stay free",
                *(phase.value, needed / GIB, free / GIB, margin / GIB),
            )
        return False
