"""An engine rank's connection to its producer, whichever transport the weights take."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nemo_rl_lite.config.sections.generation import RefitConfig
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.layout.plan import RefitPlan
from nemo_rl_lite.refit.transport.group import Meeting, join_at
from nemo_rl_lite.refit.transport.interface import Offer, Receiver


@dataclass(frozen=True)
class Source:
    """Where one consumer gets its weights, and how."""

    plan: RefitPlan
    config: RefitConfig
    meeting: Meeting
    offer: Offer


def connect(source: Source, device: torch.device) -> Receiver:
    """Join the producer's group; returns when the producer and all its consumers have joined. `device`: where the
    engine's weights are."""
    config, offer = source.config, source.offer
    group = join_at(source.meeting, offer.group_device(device), config.timeout_s)
    return offer.receiver(source.plan, group, device, config.verify)


class WeightsState:
    """Whether an engine's weights are all of one refit. They are not before the first refit of an engine that started
    with dummy weights, between a refit's first and last bucket, and after a refit that failed, until one succeeds."""

    def __init__(self, complete: bool) -> None:
        self._complete = complete

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """The block is a refit."""
        self._complete = False
        yield
        self._complete = True

    def discard(self) -> None:
        """Note that the memory of the weights is given away."""
        self._complete = False

    def require(self) -> None:
        """Raises RefitError: the weights are not those of one policy."""
        if not self._complete:
            raise RefitError(
                "this engine has no policy's weights: none came since it started or slept, or the last refit failed"
            )
