"""vLLM: scheduler, start-up, parts of an engine, and repairs of its CPU build."""

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nemo_rl_lite.compat.versions import KERNEL_RELEASE, fits, installed, since, written_for

written_for(__name__, "vllm", "0.26", "0.31")

log = logging.getLogger(__name__)

# Versions on which tests/functional/test_vllm_scheduler.py compares `vllm_scheduler.py` with vLLM's scheduler. Other
# versions use vLLM's scheduler.
COMPARED = ("0.26.0", "0.31.0")
_SCHEDULER = "nemo_rl_lite.compat.vllm_scheduler.DecodeScheduler"
_CASCADE = "nemo_rl_lite.compat.vllm_cascade.CascadeBackend"
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
# Load format of an engine whose refits bring all weights except a draft's.
DRAFT_ONLY = "draft_only"
# Extra argument of a request: the number of its prompt's last tokens that are tokens of its response.
_DRAWN = "drawn"
# Architectures that vLLM's list for its second model runner lacks. The list has DeepSeek-V2, whose class is also
# DeepSeek-V3's, and Qwen2's experts, which compute like Qwen3's.
_SECOND_RUNNER = frozenset({"DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"})
# A large prime, so that seeds of continued requests differ from others.
_OTHER_SEED = 1_000_000_007
# Compute capability, in tenths, of GPUs that need such scales.
_BLACKWELL = 100


def decode_scheduler() -> str | None:
    """Return the path of the scheduler with a fast path for decoding; None on untested versions."""
    if (own := installed("vllm")) in COMPARED:
        return _SCHEDULER
    tested = " and ".join(COMPARED)
    log.info("using vLLM's scheduler: the fast one is tested on vLLM %s, and %s is installed", tested, own)
    return None


def prefer_second_runner() -> None:
    """Make vLLM use its second model runner for more models with experts; all samples are then drawn in one kernel.

    vLLM keeps the first one where a feature needs it, such as recorded experts or n-gram drafts. The environment
    variable `VLLM_USE_V2_MODEL_RUNNER` wins. Each process of an engine must call this. From 0.31 on, vLLM has no list.
    """
    if since("vllm", "0.31"):
        return
    from vllm.config import vllm

    module: Any = vllm
    module.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES |= _SECOND_RUNNER


def offer_cascade_attention() -> None:
    """Make `attention_backend=CUSTOM` select cascade attention by prompt. Each process of an engine must call this.
    Only `KERNEL_RELEASE` gets it; others name the missing backend."""
    if not fits("vllm", KERNEL_RELEASE):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, _CASCADE)


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


def import_model_class(model_path: Path, prefix: str = "") -> None:
    """Import vLLM's class of the model, whose architecture has this prefix in vLLM. Otherwise vLLM inspects it in
    another process, which imports everything again (24 s with a cold file cache)."""
    from vllm import ModelRegistry

    for architecture in json.loads((model_path / "config.json").read_text()).get("architectures", []):
        registered = ModelRegistry.models.get(name := prefix + architecture)
        if registered is not None:
            ModelRegistry.register_model(name, registered.load_model_cls())


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

    def put_first(self, name: str) -> None:
        """Move a new request before all others that wait, such as those whose caches were dropped."""
        waiting, request = self._scheduler.waiting, self._scheduler.requests[name]
        waiting.remove_request(request)
        waiting.prepend_request(request)

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


def continued_draws(engine: Any, seed: int, drawn: int) -> tuple[int, dict[str, int] | None]:
    """Return seed and extra arguments of a request whose prompt ends with `drawn` tokens of its response.

    Runner V2 draws random numbers by seed and position. Runner V1 draws them from a generator for each request, which
    skips those of the `drawn` tokens (`skip_draws`). With drafts, their number is unknown, so the seed changes.
    """
    options = engine.vllm_config
    if not drawn or options.use_v2_model_runner:
        return seed, None
    if options.speculative_config is not None:
        return (seed + _OTHER_SEED * drawn) % 2**31, None
    return seed, {_DRAWN: drawn}


def skip_draws(model_runner: Any) -> None:
    """Make runner V1 skip the random numbers of tokens that a request continues. V2 needs no change."""
    update = getattr(model_runner, "_update_states", None)
    if update is None:
        return

    def update_and_skip(scheduled: Any) -> Any:
        found = update(scheduled)
        for new in scheduled.scheduled_new_reqs:
            generator = model_runner.requests[new.req_id].generator
            if generator is not None and (drawn := (new.sampling_params.extra_args or {}).get(_DRAWN)):
                _skip(generator, drawn, model_runner.input_batch.vocab_size)
        return found

    model_runner._update_states = update_and_skip


def _skip(generator: torch.Generator, drawn: int, vocabulary: int) -> None:
    """Draw as vLLM's sampler does for `drawn` tokens."""
    noise, on_gpu = torch.empty(vocabulary, device=generator.device), generator.device.type == "cuda"
    before = generator.get_offset() if on_gpu else 0
    for _ in range(1 if on_gpu else drawn):
        noise.exponential_(generator=generator)
    if on_gpu:
        # Each token takes the same number of the generator's steps.
        generator.set_offset(before + drawn * (generator.get_offset() - before))


def on_lost_rank(engine: Any, call: Callable[[], None]) -> None:
    """Call a function, in a thread, when a rank process of the engine on this host has ended."""
    engine.engine_core.engine_core.model_executor.register_failure_callback(call)


def load_only_drafts() -> None:
    """Register the load format `DRAFT_ONLY`: random weights for the model, and the checkpoint's for its draft.

    Runner V2 ignores `SpeculativeConfig.draft_load_config`.
    """
    from vllm.model_executor.model_loader import DefaultModelLoader, DummyModelLoader, register_model_loader

    class DraftOnlyLoader(DummyModelLoader):
        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            if model_config.runner_type == "draft":
                loader: Any = DefaultModelLoader(replace(self.load_config, load_format="auto"))
                loader.load_weights(model, model_config)
            else:
                super().load_weights(model, model_config)

    register_model_loader(DRAFT_ONLY)(DraftOnlyLoader)


def capture_plain_decoding() -> None:
    """Make runner V2 also capture CUDA graphs of decoding without drafts, for engines that pause them.

    vLLM does so with a schedule of draft tokens by batch size, but then fails to capture the draft's own graphs
    (vllm-project/vllm#48494).
    """
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    managers: Any = CudaGraphManager
    find = managers._init_candidates

    def find_both(manager: Any) -> None:
        find(manager)
        length = manager.decode_query_len
        if length == 1:
            return
        drafted, captured = manager._candidates, manager._capture_descs
        manager._candidates, manager._capture_descs, manager.decode_query_len = {}, {}, 1
        find(manager)
        manager.decode_query_len = length
        for both, first in ((manager._candidates, drafted), (manager._capture_descs, captured)):
            for key, graphs in first.items():
                both[key] = graphs + [graph for graph in both.get(key, ()) if graph not in graphs]
        for graphs in manager._capture_descs.values():
            # vLLM captures the largest first.
            graphs.sort(key=lambda graph: graph.num_tokens, reverse=True)

    managers._init_candidates = find_both


def lengthen_head(vllm_config: Any) -> None:
    """Give a draft head as many positions as the policy's sequences.

    Published heads often have 2,048, and longer sequences read beyond their rotary table (fixed by
    vllm-project/vllm#49343).
    """
    options = vllm_config.speculative_config
    if options is None or options.method not in ("eagle", "eagle3"):
        return
    draft, length = options.draft_model_config, vllm_config.model_config.max_model_len
    for sizes in (draft.hf_config, draft.hf_text_config):
        sizes.max_position_embeddings = max(getattr(sizes, "max_position_embeddings", length), length)
    draft.max_model_len = max(draft.max_model_len, length)


class DraftSchedule:
    """The number of draft tokens that an engine's scheduler asks for."""

    def __init__(self, engine: Any):
        self._scheduler = engine.engine_core.engine_core.scheduler
        # By the number of requests in a step; None for the configured number.
        self._own = self._scheduler.dynamic_sd_lookup

    def allow(self, allowed: bool) -> None:
        """Ask for drafts from the next step on, or no longer."""
        none = [0] * (self._scheduler.max_num_running_reqs + 1)
        self._scheduler.dynamic_sd_lookup = self._own if allowed else none


def shorten_drafts(model_runner: Any, shortened: bool) -> None:
    """Make runner V2 compute one draft token only, or as many as configured again. This one keeps the draft's KV cache
    complete. Runner V1 follows the scheduler (vllm-project/vllm#51510)."""
    speculator = getattr(model_runner, "speculator", None)
    if speculator is None:
        return
    from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import AutoRegressiveSpeculator

    if isinstance(speculator, AutoRegressiveSpeculator):
        speculator.num_speculative_steps = 1 if shortened else model_runner.num_speculative_steps


def rebuild_draft_buffers(draft: nn.Module) -> None:
    """Compute what vLLM derives from a draft's weights, after these changed."""
    build = getattr(getattr(draft, "model", None), "_build_fused_kv_buffers", None)
    if build is not None:
        build()


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


def _latent_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from vllm.model_executor.layers.attention import MLAAttention

    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, MLAAttention))


def absorbed_weights(model: nn.Module) -> set[str]:
    """Return the names of the matrices that vLLM computes from latent attention's `kv_b_proj`."""
    return {f"{name}.{own}" for name, layer in _latent_layers(model) for own in layer._parameters}


@torch.no_grad()
def absorb_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Compute these matrices again, in their memory. Some are views of `kv_b_proj`, others copies."""
    for _, layer in _latent_layers(model):
        layer.process_weights_after_loading(dtype)


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
    """Repair functions of vLLM's CPU build before an engine starts. The GPU kernels are correct.

    One writes temperature, top p and top k into a copy unless they are 64-bit integers, and verified drafts then have
    the wrong distribution. The other rotates only heads that are side by side in a row of two dimensions.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.utils import cpu_triton_utils as kernels

    if since("vllm", "0.31"):
        # vLLM registers what it finds in the module.
        kernels._expand_kernel_impl = _expand  # pyrefly: ignore
    else:
        kernels.expand_kernel.func = _expand
    kernel = RotaryEmbedding.forward_cpu

    def rotate(
        self: Any, positions_T: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return (kernel if query.dim() == 2 else RotaryEmbedding.forward_native)(self, positions_T, query, key)

    RotaryEmbedding.forward_cpu = rotate  # pyrefly: ignore[bad-assignment]


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
