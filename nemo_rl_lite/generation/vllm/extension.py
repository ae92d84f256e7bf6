"""The part that runs inside vLLM's own worker processes, as their `worker_extension_cls`."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.host.logs import log_to_stderr
from nemo_rl_lite.observability.memory import device_bytes
from nemo_rl_lite.refit.consumer import Connection, Receiver, Source
from nemo_rl_lite.refit.destinations import Destinations
from nemo_rl_lite.refit.report import RefitReport


class RefitExtension:
    """Methods for `LLM.collective_rpc`; `self` is vLLM's worker, one for each tensor-parallel rank."""

    model_runner: Any
    device: torch.device
    rank: int

    def refit_join(self, sources: Sequence[Source]) -> None:
        """Join this rank's producer, that of `sources[rank]`.

        Raises:
            RefitError: a model whose layers compute with tensors that vLLM derives from its weights once, at the start.
        """
        # A tensor-parallel engine's ranks are processes that vLLM has started.
        log_to_stderr()
        model, config = self.model_runner.get_model(), self.model_runner.model_config
        if config.use_mla:
            raise RefitError(
                "models with multi-head latent attention cannot be refitted: vLLM absorbs weights at start"
            )
        if config.quantization is not None:
            raise RefitError(
                f"quantised models ({config.quantization}) cannot be refitted: vLLM packs weights at start"
            )
        for backend in _experts_backends(model) if self.device.type == "cuda" else ():
            if backend not in ("TRITON", "BATCHED_TRITON"):
                raise RefitError(
                    f"experts on vLLM's backend {backend} cannot be refitted, since it lays weights out anew at start; "
                    "set +generation.vllm_kwargs.moe_backend=triton"
                )
        self._refit = Connection(sources[self.rank], torch.device(self.device))
        self._is_first_refit = True
        self._destinations = Destinations(model.load_weights, [*model.parameters(), *model.buffers()])

    def refit_receive(self) -> RefitReport:
        """Receive all weights and load them: the first time through the model's own loader, then straight into its
        parameters.

        Raises:
            RefitError: weights of the engine that the producer did not send.
        """
        model = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        on_cpu = self.device.type == "cpu"
        if on_cpu:
            receiver = self._refit.receiver(keep=True)
            loaded, report = self._load_layerwise(model, receiver), receiver.report
        else:
            report = self._refit.fill(self._destinations)
            torch.cuda.current_stream().synchronize()
            if self._is_first_refit:
                # It took memory for trials, which the policy or the cache may want.
                torch.cuda.empty_cache()
                self._is_first_refit = False
            loaded = self._destinations.filled
        stale = sorted(wanted - loaded) if loaded is not None else []
        if stale:
            raise RefitError(f"the refit left {len(stale)} weights of the engine as they were, such as {stale[0]}")
        return report

    def set_sampling_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's GPU: in use by all processes, weights, KV cache; empty on a CPU."""
        if self.device.type == "cpu":
            return {}
        cache = self.model_runner.kv_cache_config.kv_cache_tensors
        return {
            "device": device_bytes(),
            "generation_weights": int(self.model_runner.model_memory_usage),
            "kv_cache": sum(tensor.size for tensor in cache),
        }

    def _load_layerwise(self, model: Any, receiver: Receiver) -> set[str] | None:
        """vLLM packs linear weights on a CPU. Its layerwise reload undoes and redoes that, and puts back the old values
        of what did not arrive; so what did not arrive is an error here."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(model)
        loaded = model.load_weights(chain.from_iterable(arrived.named() for arrived in receiver))
        finalize_layerwise_reload(model, self.model_runner.model_config)
        return loaded


def _experts_backends(model: torch.nn.Module) -> set[str]:
    """Names of what vLLM computes unquantised experts with."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    backends = (getattr(method, "unquantized_backend", None) for method in methods)
    return {backend.name for backend in backends if backend is not None}
