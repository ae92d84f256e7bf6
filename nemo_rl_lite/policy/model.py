"""Build a megatron-core model on this rank from a Hugging Face folder, with megatron-bridge."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_lite.compat import transformer_engine
from nemo_rl_lite.compat.megatron import (
    auto_bridge,
    differentiate_swiglu_in_one_pass,
    exchange_shapes_by_direction,
    fuse_accumulation_without_apex,
    leave_queries_unnormalized,
    leave_sorted_tokens,
)
from nemo_rl_lite.compat.megatron_fields import field_value
from nemo_rl_lite.config.schema import MegatronConfig, PolicyConfig
from nemo_rl_lite.config.sizes import (
    ParallelDims,
    adapted_layers,
    adds_in_gemms,
    keeps_logits,
    linear_layers,
    makes_inputs_at_once,
    model_chunks,
    recomputed_modules,
    shares_prompts,
)
from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.models.flops import forward_cost
from nemo_rl_lite.policy import activation_offload, attention_inputs, moe, shared_prompts
from nemo_rl_lite.policy.context import ContextRanks, check_shareable, follow_groups
from nemo_rl_lite.policy.interface import ParallelPlace
from nemo_rl_lite.policy.logprobs import check_scorable
from nemo_rl_lite.policy.micro_batches import Cost
from nemo_rl_lite.policy.moe import RouterReplay
from nemo_rl_lite.refit.ipc import SharedFrozenParams

log = logging.getLogger(__name__)

OVERRIDES = "policy.megatron_cfg.model_overrides"
# Kernels of Apex and Transformer Engine, which megatron-core's local layers replace with torch.
_FUSIONS = (
    *("apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("gradient_accumulation_fusion", "persist_layer_norm"),
    *("moe_permute_fusion", "moe_grouped_gemm", "moe_router_fusion"),
)
# Fields of megatron-bridge's provider that equal those of `policy.megatron_cfg`.
_SAME_FIELDS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("context_parallel_size", "cp_comm_type", "expert_tensor_parallel_size"),
)


class Gather:
    """Gathers weights that an optimizer step leaves sharded (`overlap_param_gather`).

    megatron-core gathers them in the next training step's forward pass, each before its module. Call `complete` before
    weights are read, moved or replaced. Without overlap, all methods do nothing.
    """

    def __init__(self, chunks: list[Any]):
        wrapped = [chunk for chunk in chunks if hasattr(chunk, "ddp_config")]
        self._chunks = [chunk for chunk in wrapped if chunk.ddp_config.overlap_param_gather]
        # All ranks have loaded all weights, but megatron-core would gather in the first forward pass.
        self.overlaps = bool(self._chunks)
        self._is_behind = self.overlaps
        self.complete()

    def mark_stale(self) -> None:
        """Note that gradients were reduced: megatron-core gathers in the next forward pass."""
        self._is_behind = self.overlaps

    @torch.no_grad()
    def complete(self) -> None:
        """Gather missing weights. Collective."""
        if self._is_behind:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        self._is_behind = False

    def wait_for(self, weight: Tensor) -> None:
        """Wait for a weight that is used outside its module's forward pass. Collective."""
        for chunk in self._chunks:
            if weight in chunk.param_to_bucket_group:
                chunk.param_to_bucket_group[weight].finish_param_sync()


Mark = torch.cuda.Event | float
"""Event in a GPU's stream, or host time in seconds."""


class PassClock:
    """Times this rank's part of a pass, until data-parallel replicas exchange gradients or scores are complete.

    Includes waits within a replica, but not for other replicas. The host synchronizes with a GPU only in `take`. Passes
    are kept if replicas are `compared`.
    """

    def __init__(self, device: torch.device, compared: bool):
        self._device, self._compared = device, compared
        self._marks: list[Mark] = []
        self._kept: dict[str, list[Sequence[Mark]]] = {}

    def begin(self) -> None:
        self._marks = [self._mark()]

    def end(self) -> None:
        self._marks.append(self._mark())

    def keep(self, name: str) -> None:
        """Keep the last pass for `take`."""
        if self._compared:
            self._kept.setdefault(name, []).append(self._marks)

    def take(self) -> dict[str, list[float]]:
        """Return the seconds of kept passes since the last call, by name."""

        def seconds(begin: Mark, end: Mark) -> float:
            if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                end.synchronize()
                return begin.elapsed_time(end) / 1e3
            return end - begin  # pyrefly: ignore  # both are the host's

        kept, self._kept = self._kept, {}
        return {name: [seconds(*marks) for marks in passes] for name, passes in kept.items()}

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class MegatronModel:
    """Model chunks of this rank, with the bridge and the layout."""

    bridge: Any
    chunks: list[Any]
    place: ParallelPlace
    device: torch.device
    half_precision: bool
    keep_logits: bool = False
    """Keep logits for the backward pass."""
    lora: Any = None
    """megatron-bridge's LoRA, or None."""
    trains: bool = True
    """Chunks are wrapped in megatron-core's DistributedDataParallel."""
    context: ContextRanks = field(default_factory=ContextRanks)
    cost: Cost = float
    replay: RouterReplay | None = None
    in_engine: SharedFrozenParams = field(default_factory=SharedFrozenParams)
    """Frozen weights in the memory of the engine on this device."""
    multiple: int = 1
    """Passes have a multiple of this many micro-batches: the pipeline stages, if they interleave chunks."""

    @cached_property
    def gather(self) -> Gather:
        return Gather(self.chunks)

    @cached_property
    def clock(self) -> PassClock:
        return PassClock(self.device, compared=self.place.data_size > 1)

    def finish_gradients(self, *arguments: Any, **options: Any) -> None:
        """Stop the clock of a training pass, and call megatron-core's `finalize_model_grads`."""
        from megatron.core.distributed import finalize_model_grads

        self.clock.end()
        finalize_model_grads(*arguments, **options)

    @property
    def bare_chunks(self) -> list[Any]:
        return [chunk.module for chunk in self.chunks] if self.trains else self.chunks

    def parameters(self) -> list[Tensor]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def own_parameters(self) -> list[Tensor]:
        """Return the parameters that are not in an engine's memory."""
        return [parameter for parameter in self.parameters() if parameter not in self.in_engine]

    def state(self) -> list[Tensor]:
        """Return parameters, and buffers such as expert biases."""
        return self.parameters() + [buffer for chunk in self.bare_chunks for buffer in chunk.buffers()]

    def train_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)


def build_model(
    config: PolicyConfig,
    path: str,
    on_gpu: bool,
    timeout_s: float,
    seed: int,
    trains: bool = True,
    reads: bool = True,
    on_meta: bool = False,
) -> MegatronModel:
    """Start torch.distributed and model parallelism, build the model and, if it `reads`, load its weights. Models of a
    process have one parallel layout. `on_meta`: the model's own parameters have no memory, and nothing is loaded.

    The environment has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The model is on the CPU, or on the process's
    first GPU, with Transformer Engine's layers. It has gradient buffers if it `trains`.

    Raises:
        TrainingError: this model cannot be trained with these options.
    """
    parallel, device = config.megatron_cfg, torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    bridge = auto_bridge().from_hf_pretrained(path)
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    provider = bridge.to_megatron_provider(load_weights=False)
    set_fields(provider, config, on_gpu)
    if provider.multi_latent_attention and provider.q_lora_rank is None:
        leave_queries_unnormalized()
    provider.finalize()
    check_shareable(provider)
    transformer_engine.exchange_heads_on_device(provider)
    if not parallel_state.model_parallel_is_initialized():
        provider.initialize_model_parallel(seed=seed, distributed_timeout_minutes=math.ceil(timeout_s / 60))
    peft, lora = parallel.peft, None
    if peft.enabled:
        from megatron.bridge.peft.lora import LoRA

        latent = provider.multi_latent_attention
        targets = adapted_layers(peft, linear_layers(latent, latent and provider.q_lora_rank is not None))
        lora = LoRA(target_modules=list[str](targets), dim=peft.dim, alpha=peft.alpha, dropout=peft.dropout)
    model = MegatronModel(
        bridge,
        _build_chunks(bridge, provider, parallel, lora, on_gpu, trains, reads, on_meta),
        _own_place(parallel),
        device,
        half_precision=config.precision != "float32",
        keep_logits=keeps_logits(config),
        lora=lora,
        trains=trains,
        context=context_ranks(parallel.hybrid_context_parallel),
        cost=forward_cost(Path(path)),
        multiple=parallel.pipeline_model_parallel_size if model_chunks(parallel) > 1 else 1,
    )
    if lora is not None:
        sizes = [(parameter.requires_grad, parameter.numel()) for parameter in model.parameters()]
        trained, total = sum(size for is_trained, size in sizes if is_trained), sum(size for _, size in sizes)
        log.info("LoRA: %d of %d parameters are trained on this rank", trained, total)
    if config.router_replay.enabled:
        model.replay = moe.replaying(model.chunks, parallel, model.context, device)
        model.place = replace(model.place, replayed_layers=model.replay.layers)
    if model.context.by_length:
        follow_groups(model.bare_chunks)
    if shares_prompts(config, on_gpu):
        shares = shared_prompts.install(model.bare_chunks, config, device)
        model.place = replace(model.place, shares_prompts=shares)
    if makes_inputs_at_once(config, on_gpu):
        attention_inputs.install(model.bare_chunks)
    if model.place.has_logits:
        check_scorable(unwrap_model(model.chunks[-1]))
    return model


def _build_chunks(
    bridge: Any,
    provider: Any,
    parallel: MegatronConfig,
    lora: Any,
    on_gpu: bool,
    trains: bool,
    reads: bool,
    on_meta: bool,
) -> list[Any]:
    """Build this rank's model chunks and, if it `reads`, load their weights. With LoRA it reads. See `build_model`."""
    from megatron.core import parallel_state

    in_graphs = on_gpu and parallel.cuda_graph_impl != "none"

    def before_wrapping(bare: list[Any]) -> list[Any]:
        """Add adapters and freeze weights, so that frozen weights get no gradient buffers."""
        if lora is not None:
            if not on_meta:
                _load_weights(bridge, bare, on_gpu)
            bare = lora(bare)
        for chunk in bare if in_graphs else ():
            # Makes megatron-core wrap on the graphs' stream, because AccumulateGrad nodes keep their first stream.
            chunk.config.cuda_graph_impl = "full_iteration"
        return moe.freeze(bare) if parallel.freeze_moe_router else bare

    chunks = provider.provide_distributed_model(
        ddp_config=ddp_config(parallel, parallel_state.get_data_parallel_world_size(with_context_parallel=True)),
        wrap_with_ddp=trains,
        use_cpu_initialization=not on_gpu,
        init_model_with_meta_device=on_meta,
        pre_wrap_hook=before_wrapping if lora is not None or parallel.freeze_moe_router or in_graphs else None,
    )
    transformer_engine.leave_random_state(chunks)
    if in_graphs:
        _check_dropout(chunks)
    moe.keep_biases_in_float32(chunks)
    leave_sorted_tokens(chunks)
    if lora is None and reads and not on_meta:
        _load_weights(bridge, chunks, on_gpu)
    activation_offload.add_mlps(chunks, parallel)
    return chunks


@torch.no_grad()
def _load_weights(bridge: Any, chunks: Sequence[Any], on_gpu: bool) -> None:
    """Load the weights of model chunks. One rank of each data-parallel group reads and converts them, and broadcasts
    the result."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    dense, experts = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    reads = torch.tensor(0 in (dist.get_rank(dense), dist.get_rank(experts)), dtype=torch.int32, device=device)
    # Tensor-parallel ranks read together.
    dist.all_reduce(reads, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    if reads:
        bridge.load_hf_weights(list(chunks))
    for chunk in unwrap_model(list(chunks)):
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            # megatron-core's mark of weights that expert-parallel ranks divide.
            group: Any = dense if getattr(tensor, "allreduce", True) else experts
            if dist.get_world_size(group) > 1:
                sent = tensor.to(device)
                dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
                tensor.copy_(sent)


def is_adapter(name: str) -> bool:
    return ".adapter." in name


def context_ranks(hybrid: bool = False) -> ContextRanks:
    """Return this rank's context-parallel group. `hybrid`: single ranks may have micro-batches whole."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True) if hybrid and size > 1 else None
    return ContextRanks(rank, size, group, alone)  # pyrefly: ignore  # a member gets its group


def ddp_config(parallel: MegatronConfig, replicas: int) -> Any:
    """Return the options of megatron-core's DistributedDataParallel. `replicas`: ranks that average gradients."""
    from megatron.core.distributed import DistributedDataParallelConfig

    options = parallel.distributed_data_parallel_config
    return DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.optimizer.use_distributed_optimizer,
        grad_reduce_in_fp32=options.grad_reduce_in_fp32,
        # Also for one replica, because it decides the buckets, which some checkpoints store.
        overlap_grad_reduce=options.overlap_grad_reduce is True,
        overlap_param_gather=options.overlap_param_gather is True and replicas > 1,
        bucket_size=options.bucket_size,
        # The worker checks the gradients of all ranks, and skips the step.
        check_for_nan_in_grad=False,
    )


def set_fields(provider: Any, config: PolicyConfig, on_gpu: bool) -> None:
    """Copy the configuration to megatron-bridge's provider, before it is finalized."""
    parallel, dtype = config.megatron_cfg, getattr(torch, config.precision)
    for name in _SAME_FIELDS:
        setattr(provider, name, getattr(parallel, name))
    # megatron-core rejects it on one rank, where it has no effect.
    provider.sequence_parallel = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, False
    if model_chunks(parallel) > 1:
        provider.virtual_pipeline_model_parallel_size = model_chunks(parallel)
        # Of megatron-core's ways to send, only this one works for two stages, which are both neighbours of each other.
        provider.overlap_p2p_comm, provider.batch_p2p_comm = True, False
        exchange_shapes_by_direction()
    # Pipeline stages send the shapes of micro-batches. Of the dispatchers, all-gather does not support that.
    provider.variable_seq_lengths = parallel.pipeline_model_parallel_size > 1
    provider.moe_token_dispatcher_type = "alltoall"
    # No loss trains a checkpoint's layers for multi-token prediction.
    provider.mtp_num_layers = None
    moe.set_fields(provider, parallel)
    _set_recomputation(provider, parallel)
    activation_offload.set_fields(provider, parallel)
    if on_gpu:
        _set_gpu_kernels(provider, parallel)
    else:
        _set_local_layers(provider)
    for name, value in parallel.model_overrides.items():
        if not hasattr(provider, name):
            raise TrainingError(f"{OVERRIDES}.{name}: this model's {type(provider).__name__} has no such field")
        setattr(provider, name, field_value(name, value))


def _set_recomputation(provider: Any, options: MegatronConfig) -> None:
    if not options.activation_checkpointing:
        return
    provider.recompute_granularity = options.recompute_granularity
    if options.recompute_granularity == "full":
        provider.recompute_method = options.recompute_method
        provider.recompute_num_layers = options.recompute_num_layers
    else:
        provider.recompute_modules = recomputed_modules(options)


def _set_local_layers(provider: Any) -> None:
    provider.transformer_layer_spec = _local_layers
    provider.use_cpu_initialization = True
    for fusion in _FUSIONS:
        setattr(provider, fusion, False)


def _local_layers(provider: Any, vp_stage: int | None = None) -> Any:
    """Return megatron-core's local layers of a pipeline stage. megatron-bridge's `local_layer_spec` has neither dense
    layers next to layers with experts, nor latent attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp

    block: Any = get_gpt_decoder_block_spec(
        provider, use_transformer_engine=False, normalization=provider.normalization, vp_stage=vp_stage
    )
    if provider.multi_latent_attention and provider.q_lora_rank is None:
        for layer in block.layer_specs:
            # Only compressed queries are normalized.
            layer.submodules.self_attention.submodules.q_layernorm = IdentityOp
    return block


def _set_gpu_kernels(provider: Any, options: MegatronConfig) -> None:
    """Set the kernels of Transformer Engine's layers.

    The all-to-all of routed experts is not overlapped. megatron-core's `overlap_moe_expert_parallel_comm` holds
    activations of two micro-batches and replaces `passes.forward` with a schedule plan.
    `overlap_dispatch_backward_with_experts_wgrad` needs its FSDP: it computes expert gradients after the hooks that
    accumulate them in DistributedDataParallel.
    """
    # Unfused, packed sequences are rotated one by one in Python. Latent attention's own kernel is untested.
    provider.apply_rope_fusion = not provider.multi_latent_attention
    # megatron-bridge sets it for some models. Unfused, the activation keeps two more copies of its input.
    provider.bias_activation_fusion = provider.gated_linear_unit and provider.activation_func is F.silu
    differentiate_swiglu_in_one_pass()
    provider.gradient_accumulation_fusion = adds_in_gemms(options, on_gpu=True)
    if provider.gradient_accumulation_fusion:
        fuse_accumulation_without_apex()
    if options.fp8_cfg.enabled:
        provider.fp8, provider.fp8_recipe = options.fp8_cfg.fp8, options.fp8_cfg.fp8_recipe
    if provider.num_moe_experts:
        provider.moe_token_dispatcher_type = options.moe_token_dispatcher_type
        provider.moe_flex_dispatcher_backend = options.moe_flex_dispatcher_backend
        provider.moe_shared_expert_overlap = options.moe_shared_expert_overlap
        provider.moe_grouped_gemm = options.moe_grouped_gemm
        if options.moe_grouped_gemm:
            transformer_engine.multiply_experts_at_once()
        provider.moe_permute_fusion = options.moe_permute_fusion
        provider.moe_router_fusion = options.moe_router_fusion


def _check_dropout(chunks: Sequence[Any]) -> None:
    """Raise TrainingError for a model with dropout, which a graph cannot seed per step."""
    for chunk in chunks:
        shares = (chunk.config.hidden_dropout, chunk.config.attention_dropout)
        if any(shares):
            raise TrainingError(
                f"policy.megatron_cfg.cuda_graph_impl: the model has dropout ({max(shares):g}), which CUDA graphs "
                "cannot seed per step; set policy.megatron_cfg.cuda_graph_impl=none"
            )


def _own_place(parallel: MegatronConfig) -> ParallelPlace:
    from megatron.core import parallel_state

    return ParallelPlace(
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        has_logits=parallel_state.is_pipeline_last_stage(),
        is_whole=not ParallelDims.of(parallel, dist.get_world_size()).splits_weights,
        context_rank=parallel_state.get_context_parallel_rank(),
    )
