"""A consumer's connection to its producer, whichever way the weights come."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.broadcast import BroadcastReceiver
from nemo_rl_lite.refit.group import Meeting, RefitGroup
from nemo_rl_lite.refit.ipc import IpcReceiver, StagingHandle
from nemo_rl_lite.refit.plan import RefitPlan

Receiver = BroadcastReceiver | IpcReceiver


@dataclass(frozen=True)
class Source:
    """Where one consumer gets its weights: the producer's meeting point and, on the same device, its buffer."""

    plan: RefitPlan
    meeting: Meeting
    staging: StagingHandle | None


class Connection:
    """Joins the producer's group once; `receiver()` for each refit."""

    def __init__(self, source: Source, device: torch.device, verify: bool, timeout_s: float):
        """Returns when the producer and all its consumers have joined. `device`: where the engine's weights are."""
        self._plan, self._verify = source.plan, verify
        self._device = device
        # Next to a shared buffer only small messages travel.
        group_device = device if source.staging is None else torch.device("cpu")
        self._group: RefitGroup = refit_group.join_at(source.meeting, group_device, timeout_s)
        self._staging: Tensor | None = None
        if source.staging is not None:
            self._staging = source.staging.open()
            self._group.meet("the staging buffer")

    def receiver(self, keep: bool) -> Receiver:
        """One refit. With `keep` the tensors stay good after the next bucket is asked for."""
        if self._staging is None:
            return BroadcastReceiver(self._plan, self._group, self._verify)
        return IpcReceiver(self._plan, self._group, self._staging, self._verify, keep)
