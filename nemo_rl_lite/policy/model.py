"""Builds a megatron-core model on this rank from a Hugging Face folder, through megatron-bridge."""

import gc
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_lite.compat import transformer_engine
from nemo_rl_lite.compat.megatron import auto_bridge, forget_groups
from nemo_rl_lite.config.schema import MegatronConfig, PolicyConfig
from nemo_rl_lite.config.sizes import ParallelDims, keeps_logits
from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.policy import activation_offload, moe
from nemo_rl_lite.policy.context import ContextRanks, check_shareable
from nemo_rl_lite.policy.logprobs import check_scorable
from nemo_rl_lite.policy.moe import RouterReplay
from nemo_rl_lite.refit.ipc import SharedFrozenParams

log = logging.getLogger(__name__)

# Fused kernels of Apex and Transformer Engine, which the local layer spec replaces by plain torch.
_FUSIONS = (
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "moe_permute_fusion",
    "moe_grouped_gemm",
    "moe_router_fusion",
)


class Gather:
    """Gathers weights that an optimizer step leaves sharded (`overlap_param_gather`).

    megatron-core gathers them in the forward pass of the next training step, before the modules that use them run. Call
    `complete` before weights are read, moved or replaced. Without overlap, every method does nothing.
    """

    def __init__(self, chunks: list[Any]):
        wrapped = [chunk for chunk in chunks if hasattr(chunk, "ddp_config")]
        self._chunks = [chunk for chunk in wrapped if chunk.ddp_config.overlap_param_gather]
        # megatron-core would gather in the first forward pass, although every rank has loaded all weights.
        self.overlaps = bool(self._chunks)
        self._is_behind = self.overlaps
        self.complete()

    def fall_behind(self) -> None:
        """Note that gradients have been reduced: megatron-core gathers before the next forward pass."""
        self._is_behind = self.overlaps

    @torch.no_grad()
    def complete(self) -> None:
        """Gather all weights that are missing. Collective."""
        if self._is_behind:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        self._is_behind = False

    def wait_for(self, weight: Tensor) -> None:
        """Wait until a weight is complete that is used outside its module's forward pass. Collective."""
        for chunk in self._chunks:
            if weight in chunk.param_to_bucket_group:
                chunk.param_to_bucket_group[weight].finish_param_sync()


Mark = torch.cuda.Event | float
"""An event in a GPU's stream, or the host's time in seconds."""


class PassClock:
    """Times this rank's own part of a pass: until data-parallel replicas exchange gradients, or scores are complete.

    Waits for other replicas are not part of it; waits within a replica are. On a GPU the host waits only when marks are
    read. Passes are kept if replicas are `compared`.
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
        """Keep the pass that has just ended, until `take`."""
        if self._compared:
            self._kept.setdefault(name, []).append(self._marks)

    def take(self) -> dict[str, list[float]]:
        """Return the seconds of the passes that were kept since the last call, by name."""

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


@dataclass(frozen=True)
class ParallelPlace:
    """Place of a rank in the parallel layout."""

    data_rank: int
    data_size: int
    tensor_rank: int
    pipeline_rank: int
    has_logits: bool
    is_whole: bool
    context_rank: int = 0

    @property
    def reports(self) -> bool:
        """True if this rank's results stand for its data-parallel replica."""
        return self.has_logits and self.tensor_rank == 0 and self.context_rank == 0


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
    """megatron-bridge's description of LoRA's adapters; None without any."""
    trains: bool = True
    """Chunks are wrapped for their gradients, in megatron-core's DistributedDataParallel."""
    context: ContextRanks = field(default_factory=ContextRanks)
    replay: RouterReplay | None = None
    in_engine: SharedFrozenParams = field(default_factory=SharedFrozenParams)
    """Frozen weights in the memory of the engine on this device."""

    @cached_property
    def gather(self) -> Gather:
        return Gather(self.chunks)

    @cached_property
    def clock(self) -> PassClock:
        return PassClock(self.device, compared=self.place.data_size > 1)

    def finish_gradients(self, *arguments: Any, **options: Any) -> None:
        """End this rank's own part of a training pass, and call megatron-core's `finalize_model_grads`."""
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
        """Return parameters, and buffers such as the biases that balance experts."""
        return self.parameters() + [buffer for chunk in self.bare_chunks for buffer in chunk.buffers()]

    def train_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)


def build_model(
    config: PolicyConfig, path: str, on_gpu: bool, timeout_s: float, seed: int, trains: bool = True
) -> MegatronModel:
    """Start torch.distributed and model parallelism, build the model and load its weights.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in the environment. The model is on the CPU, or on the first
    GPU that this process sees, with Transformer Engine's layers. Logits, loss and export agree with the Hugging Face
    model for any tensor, pipeline and data parallel size. A model that does not train has no gradients.

    Raises:
        TrainingError: this model cannot be trained with these options.
    """
    parallel, device = config.megatron_cfg, torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    bridge = auto_bridge().from_hf_pretrained(path)
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    provider = bridge.to_megatron_provider(load_weights=False)
    set_fields(provider, config, on_gpu)
    provider.finalize()
    check_shareable(provider)
    transformer_engine.exchange_heads_on_device(provider)
    provider.initialize_model_parallel(seed=seed, distributed_timeout_minutes=math.ceil(timeout_s / 60))
    peft, lora = parallel.peft, None
    if peft.enabled:
        from megatron.bridge.peft.lora import LoRA

        lora = LoRA(target_modules=list(peft.target_modules), dim=peft.dim, alpha=peft.alpha, dropout=peft.dropout)
    in_graphs = on_gpu and parallel.cuda_graph_impl != "none"

    def before_wrapping(bare: list[Any]) -> list[Any]:
        """Add adapters and freeze weights before gradient buffers are made, so that frozen weights get none."""
        if lora is not None:
            bridge.load_hf_weights(bare)
            bare = lora(bare)
        for chunk in bare if in_graphs else ():
            # megatron-core then wraps on the stream that graphs record: AccumulateGrad nodes keep the stream they were
            # created on.
            chunk.config.cuda_graph_impl = "full_iteration"
        return moe.freeze(bare) if parallel.freeze_moe_router else bare

    chunks = provider.provide_distributed_model(
        ddp_config=ddp_config(parallel, parallel_state.get_data_parallel_world_size(with_context_parallel=True)),
        wrap_with_ddp=trains,
        use_cpu_initialization=not on_gpu,
        pre_wrap_hook=before_wrapping if lora is not None or parallel.freeze_moe_router or in_graphs else None,
    )
    transformer_engine.leave_random_state(chunks)
    if in_graphs:
        _check_dropout(chunks)
    moe.keep_biases_in_float32(chunks)
    if lora is None:
        bridge.load_hf_weights(chunks)
    activation_offload.add_mlps(chunks, parallel)
    model = MegatronModel(
        bridge,
        chunks,
        _own_place(parallel),
        device,
        half_precision=config.precision != "float32",
        keep_logits=keeps_logits(config),
        lora=lora,
        trains=trains,
        context=context_ranks(),
    )
    if lora is not None:
        sizes = [(parameter.requires_grad, parameter.numel()) for parameter in model.parameters()]
        trained, total = sum(size for is_trained, size in sizes if is_trained), sum(size for _, size in sizes)
        log.info("LoRA: %d of %d parameters are trained on this rank", trained, total)
    if config.router_replay.enabled:
        model.replay = moe.replaying(chunks, parallel, model.context, device)
    if model.place.has_logits:
        check_scorable(unwrap_model(chunks[-1]))
    return model


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's."""
    return ".adapter." in name


def context_ranks() -> ContextRanks:
    """Return this rank's place among those that share each sequence."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    return ContextRanks(dist.get_rank(group), dist.get_world_size(group), group)


def ddp_config(parallel: MegatronConfig, replicas: int) -> Any:
    """Return the options of megatron-core's DistributedDataParallel. `replicas`: ranks that average their gradients."""
    from megatron.core.distributed import DistributedDataParallelConfig

    options = parallel.distributed_data_parallel_config
    return DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.optimizer.use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        # Also for a single replica: some checkpoints have its buckets, for any number of replicas.
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather and replicas > 1,
        bucket_size=options.bucket_size,
        # The worker checks the gradients of all ranks together, and skips the step.
        check_for_nan_in_grad=False,
    )


def leave_groups() -> None:
    """Leave all process groups, once no one refers to the model. Collective.

    gloo's threads and sockets end with the last reference to a group.
    """
    from megatron.core import parallel_state

    # Before the groups are destroyed: a CUDA graph of the model uses them.
    gc.collect()
    parallel_state.destroy_model_parallel()
    forget_groups()
    dist.destroy_process_group()


def set_fields(provider: Any, config: PolicyConfig, on_gpu: bool) -> None:
    """Copy the configuration to megatron-bridge's provider, before it is finalized."""
    parallel, dtype = config.megatron_cfg, getattr(torch, config.precision)
    provider.tensor_model_parallel_size = parallel.tensor_model_parallel_size
    provider.pipeline_model_parallel_size = parallel.pipeline_model_parallel_size
    provider.num_layers_in_first_pipeline_stage = parallel.num_layers_in_first_pipeline_stage
    provider.num_layers_in_last_pipeline_stage = parallel.num_layers_in_last_pipeline_stage
    provider.context_parallel_size, provider.cp_comm_type = parallel.context_parallel_size, parallel.cp_comm_type
    provider.expert_model_parallel_size = parallel.expert_model_parallel_size
    # megatron-core refuses it on one rank, where it changes nothing.
    provider.sequence_parallel = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, False
    # Pipeline stages send each other the shape of each micro-batch; the all-to-all dispatcher of experts allows for it.
    provider.variable_seq_lengths = parallel.pipeline_model_parallel_size > 1
    provider.moe_token_dispatcher_type = "alltoall"
    # A tensor-parallel group does not split single experts: whole experts are distributed over ranks.
    provider.expert_tensor_parallel_size = 1
    moe.set_fields(provider, parallel)
    if parallel.activation_checkpointing:
        provider.recompute_granularity, provider.recompute_method, provider.recompute_num_layers = "full", "uniform", 1
    activation_offload.set_fields(provider, parallel)
    if on_gpu:
        _set_gpu_kernels(provider, parallel)
        return
    from megatron.bridge.models.gpt_provider import local_layer_spec

    provider.transformer_layer_spec = local_layer_spec
    provider.use_cpu_initialization = True
    for fusion in _FUSIONS:
        setattr(provider, fusion, False)


def _set_gpu_kernels(provider: Any, options: MegatronConfig) -> None:
    """Set the kernels of Transformer Engine's layers.

    Whether shared experts compute during the all-to-all is left to the bridge, which knows the model. The all-to-all of
    routed experts is not overlapped. megatron-core's `overlap_moe_expert_parallel_comm` holds activations of two
    micro-batches and replaces `passes.forward` by a schedule plan.
    `overlap_dispatch_backward_with_experts_wgrad` is for its FSDP: it computes gradients of experts after the hooks
    that add them to the gradient buffers of its DistributedDataParallel.
    """
    # Without fusion, packed sequences are rotated one by one, in Python.
    provider.apply_rope_fusion = True
    # megatron-bridge sets it for some models only; unfused, the MLP's activation keeps two more copies of its input.
    provider.bias_activation_fusion = provider.gated_linear_unit and provider.activation_func is F.silu
    # megatron-core's output layer needs Apex for it.
    provider.gradient_accumulation_fusion = False
    if provider.num_moe_experts:
        provider.moe_grouped_gemm = options.moe_grouped_gemm
        provider.moe_permute_fusion = options.moe_permute_fusion
        provider.moe_router_fusion = options.moe_router_fusion


def _check_dropout(chunks: Sequence[Any]) -> None:
    """Raise TrainingError for a model with dropout: a graph does not take its random numbers from a step's seed."""
    for chunk in chunks:
        shares = (chunk.config.hidden_dropout, chunk.config.attention_dropout)
        if any(shares):
            raise TrainingError(
                f"policy.megatron_cfg.cuda_graph_impl: the model has dropout ({max(shares):g}), which CUDA graphs "
                "cannot repeat from a step's seed; set policy.megatron_cfg.cuda_graph_impl=none"
            )


def _own_place(parallel: MegatronConfig) -> ParallelPlace:
    from megatron.core import parallel_state

    return ParallelPlace(
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        has_logits=parallel_state.is_pipeline_last_stage(),
        is_whole=not ParallelDims.of(parallel, dist.get_world_size()).splits_weights,
        context_rank=parallel_state.get_context_parallel_rank(),
    )
