"""The part that runs inside vLLM's own worker process, as its `worker_extension_cls`."""

from typing import Any

import torch

from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.broadcast import Receiver, RefitReport
from nemo_rl_lite.refit.plan import RefitPlan


class RefitExtension:
    """Methods for `LLM.collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any

    def refit_join(self, plan: RefitPlan, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        self._refit_plan = plan
        self._refit_group = refit_group.join_at(host, port, rank, world_size, timeout_s)

    def refit_receive(self, verify: bool) -> RefitReport:
        """Receive all weights and load them.

        vLLM packs linear weights on a CPU, hence `reload_weights`, which undoes and redoes that, and not the model's
        own `load_weights`.
        """
        receiver = Receiver(self._refit_plan, self._refit_group, verify)
        self.model_runner.reload_weights(weights_iterator=iter(receiver))
        return receiver.report

    def set_sampling_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
