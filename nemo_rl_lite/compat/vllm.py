"""vLLM: the choice of a scheduler, its start, parts of an engine, and repairs of its CPU build."""

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from nemo_rl_lite.compat.versions import installed, written_for

written_for("vllm", "0.24", __name__)

log = logging.getLogger(__name__)

# `vllm_scheduler.py` rewrites vLLM's own, so an error in it could be silent. tests/functional/test_vllm_scheduler.py
# compares both on this version; on any other vLLM's own is used.
COMPARED = "0.24.0"
_SCHEDULER = "nemo_rl_lite.compat.vllm_scheduler.DecodeScheduler"
# The start of what vLLM logs at the end of a part of an engine's start, and the part's name.
PARTS = {
    "Model loading took": "model",
    "Available KV cache memory": "profiling",
    "Graph capturing finished": "cuda_graphs",
}
# vLLM's configuration imports a class from here to annotate an argument, and with it the package openai (560 modules).
_TOOL_SERVER = "vllm.entrypoints.mcp.tool_server"
# Whether DeepGEMM, which multiplies weights that share a scale by blocks, gets scales that are powers of two.
SCALES = "VLLM_USE_DEEP_GEMM_E8M0"
# The compute capability, in tenths, of the first GPUs whose hardware wants such scales.
_BLACKWELL = 100


def decode_scheduler() -> str | None:
    """Return the path of the scheduler with a shorter way for decoding; None on a version it was not compared on."""
    if (own := installed("vllm")) == COMPARED:
        return _SCHEDULER
    log.info("vLLM's own scheduler is used: ours was compared with that of vLLM %s, and %s is installed", COMPARED, own)
    return None


@contextmanager
def without_tool_servers() -> Iterator[None]:
    """Replace vLLM's tool servers, which no engine here has, by an empty class while vLLM is imported."""
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
    """Import vLLM's class of the model into this process, which needs it soon.

    vLLM would first inspect it in another process, which imports everything again (24 s with a cold file cache).
    """
    from vllm import ModelRegistry

    for architecture in json.loads((model_path / "config.json").read_text()).get("architectures", []):
        registered = ModelRegistry.models.get(architecture)
        if registered is not None:
            ModelRegistry.register_model(architecture, registered.load_model_cls())


def keep_first_scales() -> None:
    """Keep FP8 scales of any value on GPUs that take them, unless the environment says otherwise.

    vLLM quantises weights with such scales first. If it then makes them powers of two, it rounds the 8-bit weights a
    second time.
    """
    # It asks the driver; torch would open the GPU in this process, which with tensor parallelism does not compute.
    from vllm.platforms import current_platform

    if not current_platform.has_device_capability(_BLACKWELL):
        os.environ.setdefault(SCALES, "0")


def finish_begun_steps(engine: Any, step: Callable[[], None]) -> None:
    """Call `step` until an engine has returned the steps that it has begun ahead (asynchronous scheduling)."""
    core = engine.engine_core.engine_core
    core.pause_scheduler("keep", clear_cache=False)
    while core.batch_queue:
        step()
    core.resume_scheduler()


def adapter_manager(model_runner: Any) -> Any:
    """Return the `LoRAModelManager` of a worker's model runner."""
    return model_runner.lora_manager._adapter_manager


def experts_backends(model: nn.Module) -> set[str]:
    """Return the names of the backends with which vLLM computes unquantised experts."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    backends = (getattr(method, "unquantized_backend", None) for method in methods)
    return {backend.name for backend in backends if backend is not None}


def pack_shared_weights(model: nn.Module) -> None:
    """Make the CPU build pack a matrix that several layers share for each of them, as it did at start.

    Its reload packs for the layer that the loader names, the embedding. The LM head of models such as Llama is a
    separate module, and would compute with the first matrix.
    """
    layers: list[Any] = [layer for layer in model.modules() if layer._parameters.get("weight") is not None]
    uses = Counter(id(layer.weight) for layer in layers)
    for layer in layers:
        if uses[id(layer.weight)] > 1 and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def repair_cpu_build() -> None:
    """Repair functions of vLLM's CPU build, before an engine starts in this process; its GPU kernels are right.

    On processors without AVX-512 each forward pass of experts makes a layer for the activation, which vLLM allows
    only while it builds a model. Of the functions that verify drafts, one is called with an argument that it does
    not take (fixed upstream by vllm-project/vllm#46069). Another writes a request's temperature, top p or top k into
    a copy unless they are 64-bit integers, so tokens are drawn from another distribution than the requested one.
    """
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.utils import cpu_triton_utils as kernels

    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native
    kernels.expand_kernel.func = _expand
    recovered = kernels.sample_recovered_tokens_kernel
    if not isinstance(recovered.func, _WithoutPrecision):
        recovered.func = _WithoutPrecision(recovered.func)


class _WithoutPrecision:
    """Calls a function without the argument that only GPUs know."""

    def __init__(self, function: Callable[..., None]):
        self._function = function

    def __call__(self, *args: Any, USE_FP64_GUMBEL: bool = False, **named: Any) -> None:
        self._function(*args, **named)


def _expand(
    output_N: Tensor,
    input_B: Tensor,
    ends_B: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's value to its draft tokens, which end before `ends_B`; `replace_to` for `replace_from`."""
    values_B = input_B.masked_fill(input_B == replace_from, replace_to)
    output_N.copy_(values_B.repeat_interleave(ends_B.diff(prepend=ends_B.new_zeros(1))))


def record_cpu_experts(model: nn.Module) -> None:
    """Make the CPU build's layers record the experts that they choose, past the routers that would record them.

    The model was started with `enable_return_routed_experts`.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            method: Any = module.routed_experts.quant_method
            router: Any = module.router
            method.apply_monolithic = _Recording(method.apply_monolithic, router.capture_fn)


class _Recording:
    """Computes a layer's experts, after reporting the choice that it will make."""

    def __init__(self, compute: Callable[..., Tensor], tell: Callable[[Tensor], None]):
        self._compute, self._tell = compute, tell

    def __call__(self, layer: Any, x: Tensor, router_logits: Tensor, **more: Any) -> Tensor:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        names = ("top_k", "use_grouped_topk", "renormalize", "topk_group", "num_expert_group")
        names += ("custom_routing_function", "scoring_func", "routed_scaling_factor", "e_score_correction_bias")
        _, chosen = select_experts(x, router_logits, **{name: getattr(layer, name) for name in names})
        self._tell(chosen)
        return self._compute(layer=layer, x=x, router_logits=router_logits, **more)
