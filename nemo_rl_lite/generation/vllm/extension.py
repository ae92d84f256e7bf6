"""Refits inside vLLM's worker processes, as their `worker_extension_cls`.

If vLLM applies LoRA itself, it has one adapter, the policy's, which each refit overwrites.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import foreach_mul, storage_id
from nemo_rl_lite.compat.vllm import (
    absorb_weights,
    absorbed_weights,
    adapter_manager,
    adapter_names,
    experts_backends,
    forget_packed_experts,
    pack_shared_weights,
    skip_draws,
    weight_loader,
)
from nemo_rl_lite.config.engines import VLLM_LORA_RANKS, VLLM_QUANTIZATIONS
from nemo_rl_lite.config.schema import LoraConfig
from nemo_rl_lite.config.sizes import adapted_layers, linear_layers
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.observability.memory import device_bytes
from nemo_rl_lite.refit.engine import CopyReplayLoader, EngineLoader, Source, connect
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.refit.ipc import SharedWeights, share_weights
from nemo_rl_lite.refit.layout import Named
from nemo_rl_lite.refit.trace import Recipe
from nemo_rl_lite.refit.windows import Piece, WindowReceiver, WindowRoutes, needed_pieces
from nemo_rl_lite.system.machine import log_to_stderr

# Number, name and slot of the only adapter. The name replaces a folder, which is never read.
_NUMBER, _NAME, _SLOT = 1, "policy", 0

# Hugging Face's names for the parts of Megatron's layers.
_PARTS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def engine_options(lora: LoraConfig, ranks: int) -> dict[str, Any]:
    """Return the options of an engine on `ranks` GPUs that applies the policy's adapters."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in VLLM_LORA_RANKS if rank >= lora.dim and rank % ranks == 0),
        "fully_sharded_loras": ranks > 1,
        "lora_target_modules": [part for name in adapted_layers(lora, linear_layers()) for part in _PARTS[name]],
    }


def adapter_request() -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=_NAME, lora_int_id=_NUMBER, lora_path=_NAME)


@dataclass(frozen=True)
class _Part:
    """A layer of the checkpoint as a part of one of vLLM's layers, which may be fused."""

    layer: Any
    index: int
    parts: int
    packed: bool

    def target(self, first: bool) -> Tensor:
        """Return the memory of A [rank, inputs] if `first`, otherwise of B [outputs, rank], for the largest rank."""
        return (self.layer.lora_a_stacked if first else self.layer.lora_b_stacked)[self.index][_SLOT, 0]

    def own(self, first: bool, tensor: Tensor) -> Tensor:
        """Return this tensor-parallel rank's share of A or B."""
        if self.layer.tp_size == 1:
            return tensor
        slicing = self.layer.slice_lora_a if first else self.layer.slice_lora_b
        if not self.packed:
            return slicing(tensor)
        return slicing([tensor if index == self.index else None for index in range(self.parts)])[self.index]


class AdapterSlot:
    """The memory from which vLLM's layers and captured graphs read the adapter."""

    def __init__(self, manager: Any, scaling: float):
        """`manager`: vLLM's `LoRAModelManager`. `scaling`: factor of the adapter's output.

        Raises:
            RefitError: vLLM splits a layer of the model in an unknown way.
        """
        self._manager, self._scaling = manager, scaling
        self._mapper = adapter_names(manager.model)
        self._is_taken = False
        self._parts = dict(_parts(manager))
        self.wanted = {f"{name}.{which}" for name in self._parts for which in "AB"}
        """The matrices that vLLM applies, as `load` reports them."""

    @property
    def memory(self) -> list[Tensor]:
        return [part.target(first) for part in self._parts.values() for first in (True, False)]

    def take(self) -> None:
        """Register the adapter with vLLM before the first refit. The engine must be awake."""
        if self._is_taken:
            return
        # vLLM keeps an adapter's source tensors: here zeros of rank 1, which are not read again.
        self._manager.remove_all_adapters()
        self._manager.add_adapter(self._manager.create_dummy_lora(_NUMBER, 1, {}))
        self._manager.activate_adapter(_NUMBER)
        self._is_taken = True

    def load(self, named: Sequence[Named]) -> set[str]:
        """Copy matrices, by their names in PEFT, to their memory; return the names that were filled.

        Raises:
            RefitError: vLLM has no such layer.
        """
        from vllm.lora.utils import parse_fine_tuned_lora_name
        from vllm.model_executor.models.utils import is_pp_missing_parameter

        filled = set()
        for name, tensor in named:
            layer, first = parse_fine_tuned_lora_name(name, self._mapper)
            if is_pp_missing_parameter(layer, self._manager.model):
                # Another pipeline stage has it.
                continue
            if layer not in self._parts:
                raise RefitError(f"vLLM applies no adapter to {layer}; set generation.vllm_cfg.lora=merged")
            part = self._parts[layer]
            own = part.own(first, tensor)
            # vLLM splits its largest rank over GPUs, so the last ones may hold no part of this adapter.
            if own.numel():
                part.target(first)[: own.shape[0], : own.shape[1]].copy_(own)
            filled.add(f"{layer}.{'A' if first else 'B'}")
        return filled

    def scale(self) -> None:
        """Multiply B by the scaling, which vLLM does not apply."""
        if self._scaling != 1:
            foreach_mul(self._scaled, self._scaling)

    def stored(self, target: Tensor, received: Tensor) -> Tensor:
        """Return what `target`, a part of the memory, has after `received` was copied to it and scaled."""
        if self._scaling == 1 or storage_id(target) not in map(storage_id, self._scaled):
            return received
        scaled = received.clone()
        foreach_mul([scaled], self._scaling)
        return scaled

    @property
    def _scaled(self) -> list[Tensor]:
        return [part.target(False) for part in self._parts.values()]


def _parts(manager: Any) -> Iterator[tuple[str, _Part]]:
    for name, layer in manager.modules.items():
        packed = manager.packed_modules.get(name)
        names = [name] if packed is None else packed
        if len(names) != layer.n_slices:
            raise RefitError(
                f"vLLM adapts {name} in {layer.n_slices} parts, the checkpoint has {len(names)}; set "
                "generation.vllm_cfg.lora=merged"
            )
        for index, part in enumerate(names):
            yield part, _Part(layer, index, len(names), packed is not None)


class RefitExtension:
    """Methods for `LLM.collective_rpc`; `self` is vLLM's worker, one for each rank."""

    model_runner: Any
    device: torch.device
    rank: int

    def skip_draws(self) -> None:
        """See `compat.vllm.skip_draws`."""
        skip_draws(self.model_runner)

    def refit_join(self, sources: Sequence[Source], scaling: float | None = None) -> None:
        """Join this rank's producer, `sources[rank]`. `scaling`: the adapters' factor, if refits bring only adapters.

        Raises:
            RefitError: vLLM derives tensors from this model's weights only at start.
        """
        # vLLM has started the process of a rank.
        log_to_stderr()
        self._is_first_refit, self._quantizes = True, False
        self._slot: AdapterSlot | None = None
        # Free the buckets of an earlier connection, which its loader refers to.
        for earlier in ("_receiver", "_destinations"):
            vars(self).pop(earlier, None)
        if scaling is not None:
            self._slot = AdapterSlot(adapter_manager(self.model_runner), scaling)
            self._receiver = connect(sources[self.rank], torch.device(self.device))
            self._destinations = CopyReplayLoader(self._slot.load, self._slot.memory)
            return
        model, config = self.model_runner.get_model(), self.model_runner.model_config
        # vLLM calls its own quantisation "online", or by the option's name.
        self._quantizes = config.quantization in ("online", *VLLM_QUANTIZATIONS)
        if config.quantization is not None and not self._quantizes:
            raise RefitError(
                f"quantised models ({config.quantization}) cannot be refitted: vLLM packs weights at start"
            )
        if self._quantizes and config.is_moe:
            raise RefitError("quantised experts cannot be refitted: remove generation.vllm_kwargs.quantization")
        for backend in experts_backends(model) if self.device.type == "cuda" else ():
            if backend not in ("TRITON", "BATCHED_TRITON"):
                raise RefitError(
                    f"experts on vLLM's backend {backend} cannot be refitted: it changes their layout at start; "
                    "set +generation.vllm_kwargs.moe_backend=triton"
                )
        self._receiver = connect(sources[self.rank], torch.device(self.device))
        self._destinations = CopyReplayLoader(weight_loader(model), [*model.parameters(), *model.buffers()])

    def refit_receive(self) -> RefitReport:
        """Receive all weights, or only adapters. The first refit goes through the model's loader, later ones directly
        into its parameters. Packed (CPU) and quantised weights always go through the loader.

        Raises:
            RefitError: the producer did not send a weight, or an adapter cannot be applied.
        """
        model = self.model_runner.get_model()
        if self._slot is not None:
            self._slot.take()
            wanted = self._slot.wanted
            report, loaded = self._receiver.receive(self._destinations), self._destinations.filled
            self._slot.scale()
        elif self.device.type == "cpu" or self._quantizes:
            report, wanted, loaded = self._receive_layerwise(model)
        else:
            wanted = {name for name, _ in model.named_parameters()} - absorbed_weights(model)
            report, loaded = self._receiver.receive(self._destinations), self._destinations.filled
            absorb_weights(model, self.model_runner.model_config.dtype)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            if self._is_first_refit:
                # Free the memory that tracing the first refit took.
                torch.cuda.empty_cache()
                self._is_first_refit = False
        stale = sorted(wanted - loaded) if loaded is not None else []
        if stale:
            raise RefitError(f"the refit did not update {len(stale)} weights of the engine, such as {stale[0]}")
        return report

    def refit_pieces(self, recipe: Recipe) -> Sequence[Piece] | None:
        """Return the windows of parameters that the first refit has copied; None if this rank's loader does more."""
        self._needed = needed_pieces(self._destinations, recipe)
        return None if self._needed is None else [piece for piece, _ in self._needed]

    def refit_join_windows(self, routes: Sequence[WindowRoutes]) -> str | None:
        """Join the senders of this rank's windows, `routes[rank]`. Compare the windows with the weights; return the
        first tensor that differs, or None."""
        # Free the buckets of the first refit.
        self._destinations.forget_buffers()
        del self._receiver
        receiver = WindowReceiver(routes[self.rank], self._needed or (), torch.device(self.device))
        self._receiver = receiver
        return receiver.first_differing() if self._slot is None else receiver.first_differing(self._slot.stored)

    def share_weights(self) -> SharedWeights:
        """Share this rank's weights, which refits of adapters do not change."""
        return share_weights(self.model_runner.get_model().parameters())

    def memory(self) -> dict[str, int]:
        """Return `Engine.memory` of this rank's GPU."""
        if self.device.type == "cpu":
            return {}
        cache = self.model_runner.kv_cache_config.kv_cache_tensors
        return {
            "device": device_bytes(),
            "generation_weights": int(self.model_runner.model_memory_usage),
            "kv_cache": sum(tensor.size for tensor in cache),
        }

    def _receive_layerwise(self, model: Any) -> tuple[RefitReport, set[str], set[str] | None]:
        """Receive through vLLM's layerwise reload, which packs or quantises each complete layer as at start.

        Also return the names that must be loaded, and the loaded names: vLLM silently keeps old weights otherwise.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        # Each matrix once: the reload splits one that the embedding and the LM head share.
        own = {name for name, _ in model.named_parameters()}
        if self.device.type == "cpu":
            forget_packed_experts(model)
        with self._as_at_the_start():
            initialize_layerwise_reload(model)
        # Without derived tensors, such as scales.
        wanted = {name for name, _ in model.named_parameters() if name in own}
        load_named = weight_loader(model)

        def load(named: Sequence[Named]) -> set[str] | None:
            with self._as_at_the_start():
                return load_named(named)

        # vLLM keeps a layer's tensors until it has all of them.
        loader = EngineLoader(load, keep=True)
        report = self._receiver.receive(loader)
        with self._as_at_the_start():
            finalize_layerwise_reload(model, self.model_runner.model_config)
            if self.device.type == "cpu":
                pack_shared_weights(model)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            # Free the memory of the reload.
            torch.cuda.empty_cache()
        return report, wanted, loader.filled

    @contextmanager
    def _as_at_the_start(self) -> Iterator[None]:
        """Allocate on this device, and do not compile: torch 2.11 never finishes tracing vLLM's parameters while a
        default device is set."""
        with self.device, torch.compiler.set_stance("force_eager"):
            yield
