"""vLLM: scheduler, start-up, parts of an engine, and repairs of its CPU build."""

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from nemo_rl_lite.compat.versions import installed, since, written_for

written_for(__name__, "vllm", "0.26", "0.31")

log = logging.getLogger(__name__)

# Versions on which tests/functional/test_vllm_scheduler.py compares `vllm_scheduler.py` with vLLM's scheduler. Other
# versions use vLLM's scheduler.
COMPARED = ("0.26.0", "0.31.0")
_SCHEDULER = "nemo_rl_lite.compat.vllm_scheduler.DecodeScheduler"
# Log messages of vLLM at the end of each part of an engine's start-up.
PARTS = {
    "Model loading took": "model",
    "Available KV cache memory": "profiling",
    "Graph capturing finished": "cuda_graphs",
}
# vLLM's configuration imports a class from here for an annotation, and with it openai's 560 modules.
_TOOL_SERVER = "vllm.entrypoints.mcp.tool_server"
# Whether DeepGEMM, for block-wise scales, gets scales that are powers of two.
SCALES = "VLLM_USE_DEEP_GEMM_E8M0"
# Compute capability, in tenths, of GPUs that need such scales.
_BLACKWELL = 100


def decode_scheduler() -> str | None:
    """Return the path of the scheduler with a fast path for decoding; None on untested versions."""
    if (own := installed("vllm")) in COMPARED:
        return _SCHEDULER
    tested = " and ".join(COMPARED)
    log.info("using vLLM's scheduler: the fast one is tested on vLLM %s, and %s is installed", tested, own)
    return None


@contextmanager
def without_tool_servers() -> Iterator[None]:
    """Replace vLLM's unused tool servers by an empty class while vLLM is imported."""
    if _TOOL_SERVER in sys.modules:
        yield
        return
    placeholder = sys.modules[_TOOL_SERVER] = ModuleType(_TOOL_SERVER)
    vars(placeholder)["ToolServer"] = type("ToolServer", (), {})
    try:
        yield
    finally:
        del sys.modules[_TOOL_SERVER]


def import_model_class(model_path: Path) -> None:
    """Import vLLM's class of the model. Otherwise vLLM inspects it in another process, which imports everything again
    (24 s with a cold file cache)."""
    from vllm import ModelRegistry

    for architecture in json.loads((model_path / "config.json").read_text()).get("architectures", []):
        registered = ModelRegistry.models.get(architecture)
        if registered is not None:
            ModelRegistry.register_model(architecture, registered.load_model_cls())


def keep_first_scales() -> None:
    """Keep FP8 scales of any value on GPUs that support them, unless the environment decides.

    vLLM first quantises with such scales. Converting them to powers of two rounds the weights again.
    """
    # This asks the driver; torch would open the GPU in a process that may not compute on it.
    from vllm.platforms import current_platform

    if not current_platform.has_device_capability(_BLACKWELL):
        os.environ.setdefault(SCALES, "0")


class SchedulerCache:
    """The requests and the KV cache of an engine's scheduler, without vLLM's statistics."""

    def __init__(self, engine: Any):
        self._engine, self._scheduler = engine, engine.engine_core.engine_core.scheduler
        self._preempt = self._scheduler._preempt_request
        self._scheduler._preempt_request = self._count
        self.preemptions = 0
        """Requests that lost their cache because it was full."""

    def _count(self, *args: Any, **kwargs: Any) -> None:
        self.preemptions += 1
        self._preempt(*args, **kwargs)

    @property
    def usage(self) -> float:
        """Return the share of the cache's blocks that running requests use."""
        return self._scheduler.kv_cache_manager.usage

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Return the number of new and preempted requests."""
        return self._scheduler.get_request_counts()[1]

    @property
    def held_tokens(self) -> int:
        """Return the tokens of the running requests: prompts and responses so far."""
        return sum(request.num_tokens for request in self._scheduler.running)

    def drop_all(self) -> None:
        """Drop all prefixes and the caches of running requests, which are computed again. Counts no preemption.

        No step may be in flight. From 0.31 on, vLLM preempts requests whose experts it records only while it is paused.
        """
        core, counted, state = self._engine.engine_core.engine_core, self.preemptions, self._scheduler.pause_state
        core.pause_scheduler("keep", clear_cache=False)
        try:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        finally:
            self._scheduler.set_pause_state(state)
        self.preemptions = counted


def finish_begun_steps(engine: Any, step: Callable[[], None]) -> None:
    """Call `step` until the engine has finished the steps in flight (asynchronous scheduling)."""
    core = engine.engine_core.engine_core
    core.pause_scheduler("keep", clear_cache=False)
    while core.batch_queue:
        step()
    core.resume_scheduler()


def on_lost_rank(engine: Any, call: Callable[[], None]) -> None:
    """Call a function, in a thread, when a rank process of the engine on this host has ended."""
    engine.engine_core.engine_core.model_executor.register_failure_callback(call)


def adapter_manager(model_runner: Any) -> Any:
    """Return the `LoRAModelManager` of a worker's model runner."""
    return model_runner.lora_manager._adapter_manager


def adapter_names(model: nn.Module) -> Any:
    """Return vLLM's mapper of an adapter's names to the layers that it adapts; None if they are equal."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    # Adapters keep the parts of a fused layer apart.
    return mapper.get_rename_mapper() if since("vllm", "0.31") else mapper.get_unstacked_mapper()


def weight_loader(model: Any) -> Callable[[Iterable[tuple[str, Tensor]]], set[str] | None]:
    """Return the model's loader, which returns the names of the filled parameters.

    vLLM's own reports experts without the layer that holds them.
    """
    own = {name.replace(".routed_experts.", "."): name for name, _ in model.named_parameters()}

    def load(named: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        loaded = model.load_weights(named)
        return None if loaded is None else {own.get(name, name) for name in loaded}

    return load


def request_errors() -> tuple[type[Exception], ...]:
    """Return the errors with which vLLM rejects a request. From 0.31 on, its own is no `ValueError`."""
    from vllm.exceptions import VLLMValidationError

    return ValueError, VLLMValidationError


def experts_backends(model: nn.Module) -> set[str]:
    """Return the names of vLLM's backends for unquantised experts."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    backends = (getattr(method, "unquantized_backend", None) for method in methods)
    return {backend.name for backend in backends if backend is not None}


def forget_packed_experts(model: nn.Module) -> None:
    """Make the CPU build pack experts in the next reload, as at start. From 0.31 on, it packs them once per kernel."""
    methods: Iterator[Any] = (getattr(module, "quant_method", None) for module in model.modules())
    for method in methods:
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_shared_weights(model: nn.Module) -> None:
    """Make the CPU build pack a shared matrix for each of its layers, as at start.

    A reload packs it for the embedding only, and the LM head would compute with old weights.
    """
    layers: list[Any] = [layer for layer in model.modules() if layer._parameters.get("weight") is not None]
    uses = Counter(id(layer.weight) for layer in layers)
    for layer in layers:
        if uses[id(layer.weight)] > 1 and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def repair_cpu_build() -> None:
    """Repair a function of vLLM's CPU build before an engine starts. The GPU kernel is correct.

    It writes temperature, top p and top k into a copy unless they are 64-bit integers, and verified drafts then have
    the wrong distribution.
    """
    from vllm.utils import cpu_triton_utils as kernels

    if since("vllm", "0.31"):
        # vLLM registers what it finds in the module.
        kernels._expand_kernel_impl = _expand  # pyrefly: ignore
    else:
        kernels.expand_kernel.func = _expand


def _expand(
    output_N: Tensor,
    input_B: Tensor,
    ends_B: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value for its draft tokens, which end before `ends_B`, with a replacement."""
    values_B = input_B.masked_fill(input_B == replace_from, replace_to)
    output_N.copy_(values_B.repeat_interleave(ends_B.diff(prepend=ends_B.new_zeros(1))))


def record_cpu_experts(model: nn.Module) -> None:
    """Make the CPU build's layers record chosen experts, which bypass the recording routers.

    The model must have `enable_return_routed_experts`.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            method: Any = module.routed_experts.quant_method
            router: Any = module.router
            method.apply_monolithic = _Recording(method.apply_monolithic, router.capture_fn)


class _Recording:
    """Computes a layer's experts, and reports the chosen ones."""

    def __init__(self, compute: Callable[..., Tensor], tell: Callable[[Tensor], None]):
        self._compute, self._tell = compute, tell

    def __call__(self, layer: Any, x: Tensor, router_logits: Tensor, **more: Any) -> Tensor:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        names = ("top_k", "use_grouped_topk", "renormalize", "topk_group", "num_expert_group")
        names += ("custom_routing_function", "scoring_func", "routed_scaling_factor", "e_score_correction_bias")
        _, chosen = select_experts(x, router_logits, **{name: getattr(layer, name) for name in names})
        self._tell(chosen)
        return self._compute(layer=layer, x=x, router_logits=router_logits, **more)
