"""The part that runs inside vLLM's own worker process, as its `worker_extension_cls`."""

from typing import Any

import torch

from nemo_rl_lite.errors import RefitError
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

        vLLM packs linear weights on a CPU. Its layerwise reload undoes and redoes that, and puts back the old values of
        what did not arrive; so what did not arrive is an error here.

        Raises:
            RefitError: weights of the engine that the producer did not send.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        receiver = Receiver(self._refit_plan, self._refit_group, verify)
        initialize_layerwise_reload(model)
        loaded = model.load_weights(iter(receiver))
        finalize_layerwise_reload(model, self.model_runner.model_config)
        stale = sorted(wanted - loaded) if loaded is not None else []
        if stale:
            raise RefitError(f"the refit left {len(stale)} weights of the engine as they were, such as {stale[0]}")
        return receiver.report

    def set_sampling_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
