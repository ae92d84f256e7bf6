"""The part that runs inside vLLM's own worker processes, as their `worker_extension_cls`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.vllm import adapter_manager, experts_backends, pack_shared_weights
from nemo_rl_lite.config.engines import VLLM_QUANTIZATIONS
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.vllm.adapters import AdapterSlot
from nemo_rl_lite.host.machine import log_to_stderr
from nemo_rl_lite.observability.memory import device_bytes
from nemo_rl_lite.refit.engine.connection import Source, connect
from nemo_rl_lite.refit.engine.destinations import Destinations, EngineLoader
from nemo_rl_lite.refit.transport.one_copy import SharedWeights, share_weights
from nemo_rl_lite.refit.transport.report import RefitReport


class RefitExtension:
    """Methods for `LLM.collective_rpc`; `self` is vLLM's worker, one for each tensor-parallel rank."""

    model_runner: Any
    device: torch.device
    rank: int

    def refit_join(self, sources: Sequence[Source], scaling: float | None = None) -> None:
        """Join this rank's producer, which is in `sources[rank]`. `scaling`: the factor of the adapters, where they are
        all that refits bring.

        Raises:
            RefitError: a model whose layers compute with tensors that vLLM derives from its weights once, at the start.
        """
        # A tensor-parallel engine's ranks are processes that vLLM has started.
        log_to_stderr()
        self._is_first_refit, self._quantizes = True, False
        self._slot: AdapterSlot | None = None
        if scaling is not None:
            self._slot = AdapterSlot(adapter_manager(self.model_runner), scaling)
            self._receiver = connect(sources[self.rank], torch.device(self.device))
            self._destinations = Destinations(self._slot.load, self._slot.memory)
            return
        model, config = self.model_runner.get_model(), self.model_runner.model_config
        if config.use_mla:
            raise RefitError(
                "models with multi-head latent attention cannot be refitted: vLLM absorbs weights at start"
            )
        # vLLM names any quantisation that it does itself "online", or by the option that asks for it.
        self._quantizes = config.quantization in ("online", *VLLM_QUANTIZATIONS)
        if config.quantization is not None and not self._quantizes:
            raise RefitError(
                f"quantised models ({config.quantization}) cannot be refitted: vLLM packs weights at start"
            )
        if self._quantizes and config.is_moe:
            raise RefitError("no refit of quantised experts has been tried; remove generation.vllm_kwargs.quantization")
        for backend in experts_backends(model) if self.device.type == "cuda" else ():
            if backend not in ("TRITON", "BATCHED_TRITON"):
                raise RefitError(
                    f"experts on vLLM's backend {backend} cannot be refitted: it changes their layout at start; "
                    "set +generation.vllm_kwargs.moe_backend=triton"
                )
        self._receiver = connect(sources[self.rank], torch.device(self.device))
        self._destinations = Destinations(model.load_weights, [*model.parameters(), *model.buffers()])

    def refit_receive(self) -> RefitReport:
        """Receive adapters, if they are all that refits bring, or else all weights: at the first refit through the
        model's own loader, later straight into the model's parameters. Where vLLM computes with weights of another form
        (packed on a CPU, quantised), each refit goes through the loader.

        Raises:
            RefitError: weights of the engine that the producer did not send, or adapters that it cannot apply.
        """
        model = self.model_runner.get_model()
        if self._slot is not None:
            self._slot.take()
            loader, wanted = self._destinations, self._slot.wanted
            report = self._receiver.receive(loader)
            self._slot.scale()
        elif self.device.type == "cpu" or self._quantizes:
            # vLLM keeps a layer's tensors until it has all of them.
            loader = EngineLoader(lambda named: self._load(model, named), keep=True)
            report, wanted = self._receive_layerwise(model, loader)
        else:
            loader, wanted = self._destinations, {name for name, _ in model.named_parameters()}
            report = self._receiver.receive(loader)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            if self._is_first_refit:
                # The policy or the cache may want the memory that the first refit took for trials.
                torch.cuda.empty_cache()
                self._is_first_refit = False
        loaded = loader.filled
        stale = sorted(wanted - loaded) if loaded is not None else []
        if stale:
            raise RefitError(f"the refit left {len(stale)} weights of the engine as they were, such as {stale[0]}")
        return report

    def share_weights(self) -> SharedWeights:
        """Share this rank's weights, which refits of adapters leave as they are; see `one_copy.share_weights`."""
        return share_weights(self.model_runner.get_model().parameters())

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

    def _receive_layerwise(self, model: Any, loader: EngineLoader) -> tuple[RefitReport, set[str]]:
        """Receive within vLLM's layerwise reload: when a layer is complete, vLLM packs or quantises it as it did at the
        start and copies the result to the memory that it computes with. Returns what must have been loaded, too: vLLM
        puts back the old values of weights that did not arrive."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        # Each matrix once: the reload makes two of one that the embedding and the last layer share.
        own = {name for name, _ in model.named_parameters()}
        with self._as_at_the_start():
            initialize_layerwise_reload(model)
        # Without what vLLM derives, such as scales.
        wanted = {name for name, _ in model.named_parameters() if name in own}
        report = self._receiver.receive(loader)
        with self._as_at_the_start():
            finalize_layerwise_reload(model, self.model_runner.model_config)
            if self.device.type == "cpu":
                pack_shared_weights(model)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            # The policy may want the memory of the layers that were under way.
            torch.cuda.empty_cache()
        return report, wanted

    def _load(self, model: Any, named: Sequence[tuple[str, Tensor]]) -> set[str] | None:
        """Give tensors to the model's own loader."""
        with self._as_at_the_start():
            return model.load_weights(named)

    @contextmanager
    def _as_at_the_start(self) -> Iterator[None]:
        """Let vLLM make a layer's memory on this device. What it would compile runs as written: torch 2.11 never
        finishes tracing vLLM's kind of parameters while a default device is set."""
        with self.device, torch.compiler.set_stance("force_eager"):
            yield
