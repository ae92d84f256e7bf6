"""A consumer's connection to its producer, whichever way the weights come."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nemo_rl_lite.config.schema import RefitConfig
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.broadcast import BroadcastReceiver
from nemo_rl_lite.refit.destinations import Destinations
from nemo_rl_lite.refit.direct import DirectReceiver, DirectSource
from nemo_rl_lite.refit.group import Meeting, RefitGroup
from nemo_rl_lite.refit.ipc import IpcReceiver, StagingHandle
from nemo_rl_lite.refit.packing import new_buffers
from nemo_rl_lite.refit.plan import RefitPlan
from nemo_rl_lite.refit.report import RefitReport

Receiver = BroadcastReceiver | IpcReceiver | DirectReceiver
Shared = StagingHandle | DirectSource
"""What a producer on the same device has for its consumers: a buffer, or its parameters."""


@dataclass(frozen=True)
class Source:
    """Where one consumer gets its weights, and how. `shared`: of a producer on the same device."""

    plan: RefitPlan
    config: RefitConfig
    meeting: Meeting
    shared: Shared | None


class Connection:
    """Joins the producer's group once; `receiver()` for each refit."""

    def __init__(self, source: Source, device: torch.device):
        """Returns when the producer and all its consumers have joined. `device`: where the engine's weights are."""
        config, plan, shared = source.config, source.plan, source.shared
        self._plan, self._verify = plan, config.verify
        # Next to shared memory only small messages travel.
        group_device = device if shared is None else torch.device("cpu")
        self._group: RefitGroup = refit_group.join_at(source.meeting, group_device, config.timeout_s)
        self._shares_buffers, self._direct = isinstance(shared, StagingHandle), None
        if isinstance(shared, StagingHandle):
            self._buffers = shared.open()
            self._group.meet("the staging buffer")
        elif isinstance(shared, DirectSource):
            self._direct = DirectReceiver(plan, self._group, shared.recipe, device, config.verify)
        else:
            self._buffers = new_buffers(plan, config.num_buffers, device)

    def receiver(self, keep: bool) -> Receiver:
        """One refit. With `keep` the tensors stay good after the next bucket is asked for, other than from a producer's
        parameters."""
        if self._direct is not None:
            return self._direct
        kind = IpcReceiver if self._shares_buffers else BroadcastReceiver
        return kind(self._plan, self._group, self._buffers, self._verify, keep)

    def fill(self, destinations: Destinations) -> RefitReport:
        """One refit of an engine, into its own memory.

        Raises:
            RefitError: see the receivers.
        """
        receiver = self.receiver(keep=False)
        if isinstance(receiver, DirectReceiver):
            receiver.fill(destinations)
        else:
            for arrived in receiver:
                destinations.fill(arrived)
        return receiver.report


class Wholeness:
    """Whether an engine's weights are all of one refit. They are not before the first one, where the engine has started
    with none worth reading, between a refit's first and last bucket, nor after one that failed, until one succeeds."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Around a refit."""
        self._whole = False
        yield
        self._whole = True

    def lose(self) -> None:
        """To be called when the memory behind the weights is given away."""
        self._whole = False

    def require(self) -> None:
        """Raises RefitError: the weights are not those of one policy."""
        if not self._whole:
            raise RefitError(
                "this engine has no policy's weights: none came since it started or slept, or the last refit failed"
            )
