"""Builds a megatron-core model on this rank from a Hugging Face folder, through megatron-bridge.

Low-rank adapters (LoRA, Hu et al. 2021) through megatron-bridge: the weights are frozen, and small matrices
parallel to linear layers are trained. The bridge merges them into the weights it exports,
for engines and folders alike.

What a model needs so that CUDA graphs can record its training passes.

What data-parallel replicas exchange while they compute: gradients during the backward pass, and the weights that an
optimizer step leaves sharded during the next training step's forward pass.

How long this rank's own part of a pass takes: from where data-parallel replicas have agreed on the micro-batches to
where they exchange gradients, or where scores are complete. What replicas wait for each other is not part of it; what
ranks of one replica wait for each other is.

The fields of megatron-bridge's provider, from which it builds a model: the parallel layout, and the kernels.
"""

import gc
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from nemo_rl_lite.config.schema import LoraConfig, MegatronConfig, PolicyConfig
from nemo_rl_lite.config.sizes import ParallelDims, keeps_logits
from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.policy import activation_offload, moe
from nemo_rl_lite.policy.context import ContextRanks, check_shareable
from nemo_rl_lite.policy.logprobs import check_scorable
from nemo_rl_lite.policy.moe import RouterReplay
from nemo_rl_lite.refit.ipc import SharedFrozenParams


def adapters(config: LoraConfig) -> Any:
    """megatron-bridge's own description of the adapters."""
    from megatron.bridge.peft.lora import LoRA

    return LoRA(target_modules=list(config.target_modules), dim=config.dim, alpha=config.alpha, dropout=config.dropout)


def trained_of_all(chunks: list[Any]) -> tuple[int, int]:
    """The number of parameters that have a gradient, and of all parameters."""
    sizes = [(parameter.requires_grad, parameter.numel()) for chunk in chunks for parameter in chunk.parameters()]
    return sum(size for trained, size in sizes if trained), sum(size for _, size in sizes)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return ".adapter." in name


class WithoutAdapters:
    """The reference policy of a model with adapters: the same weights without the adapters."""

    def __init__(self, chunks: list[Any], adapted: Any):
        """`adapted`: what `adapters` gave, after it was applied to the chunks."""
        self._chunks, self._adapted = chunks, adapted

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model is the reference; afterwards, also after an error, the policy again."""
        with self._adapted.disable_adapter(self._chunks):
            yield


def accumulate_where_recorded(bare: list[Any]) -> list[Any]:
    """Let megatron-core wrap the model on the stream on which graphs are recorded: the nodes that accumulate gradients
    run on the stream that they were made on, for ever."""
    for chunk in bare:
        chunk.config.cuda_graph_impl = "full_iteration"
    return bare


def check_recordable(chunks: Sequence[Any]) -> None:
    """Check what the configuration does not show.

    Raises:
        TrainingError: the model has dropout, whose random numbers a graph does not take from the seed of a step.
    """
    for chunk in chunks:
        shares = (chunk.config.hidden_dropout, chunk.config.attention_dropout)
        if any(shares):
            raise TrainingError(
                f"policy.megatron_cfg.cuda_graph_impl: the model has dropout ({max(shares):g}), which CUDA graphs "
                "cannot repeat from a step's seed; set policy.megatron_cfg.cuda_graph_impl=none"
            )


def ddp_config(parallel: MegatronConfig, replicas: int) -> Any:
    """The options of megatron-core's DistributedDataParallel. `replicas`: ranks that average their gradients."""
    from megatron.core.distributed import DistributedDataParallelConfig

    options = parallel.distributed_data_parallel_config
    return DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.optimizer.use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        # Also of a single replica, because some checkpoints have its buckets, for any number of replicas.
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather and replicas > 1,
        bucket_size=options.bucket_size,
        # The worker looks at all ranks' gradients at once, and skips the step.
        check_for_nan_in_grad=False,
    )


def connect_schedules(chunks: list[Any], model_config: Any) -> None:
    """Let megatron-core's schedules reduce gradients with the last micro-batch only, and those of later pipeline stages
    when all of their backward passes have ended, as its own training loop does."""
    if not chunks[0].ddp_config.overlap_grad_reduce:
        return
    one = len(chunks) == 1
    no_sync, start = [chunk.no_sync for chunk in chunks], [chunk.start_grad_sync for chunk in chunks]
    model_config.no_sync_func = no_sync[0] if one else no_sync
    model_config.grad_sync_func = start[0] if one else start


class Gather:
    """The weights of a model whose optimizer step leaves each rank with its share of them.

    megatron-core gathers the rest before the modules that use them run, in the forward pass of the next training step.
    Whoever reads weights before that, moves or replaces them, calls `complete` first. Where nothing overlaps, the
    optimizer step has gathered them, and no method does anything.
    """

    def __init__(self, chunks: list[Any]):
        wrapped = [chunk for chunk in chunks if hasattr(chunk, "ddp_config")]
        self._chunks = [chunk for chunk in wrapped if chunk.ddp_config.overlap_param_gather]
        # megatron-core would gather in the first forward pass, although every rank has loaded all weights.
        self._is_behind = self.overlaps
        self.complete()

    @property
    def overlaps(self) -> bool:
        """Whether an optimizer step leaves weights to be gathered."""
        return bool(self._chunks)

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
        """Wait until a weight is whole that is used outside of its module's forward pass. Collective."""
        for chunk in self._chunks:
            if weight in chunk.param_to_bucket_group:
                chunk.param_to_bucket_group[weight].finish_param_sync()


Mark = torch.cuda.Event | float
"""A place in a GPU's stream, or the host's time in seconds."""


class PassClock:
    """Marks the beginning and the end of passes. On a GPU these are places in its stream, so that the host does not
    wait until they are read. Passes are kept where they are `compared` with those of other replicas."""

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
        """The seconds of the passes that were kept since the last call, by name."""
        kept, self._kept = self._kept, {}
        return {name: [_seconds(*marks) for marks in passes] for name, passes in kept.items()}

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    return end - begin  # pyrefly: ignore  # both are the host's


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


def torch_dtype(precision: str) -> torch.dtype:
    return getattr(torch, precision)


def set_fields(provider: Any, config: PolicyConfig, on_gpu: bool) -> None:
    """Set what the configuration says, before the provider is finalized: with Transformer Engine's layers on a GPU,
    with megatron-core's local ones on a CPU."""
    _set_layout(provider, config)
    if on_gpu:
        _set_gpu_kernels(provider, config.megatron_cfg)
    else:
        _set_cpu_kernels(provider)


def _set_layout(provider: Any, config: PolicyConfig) -> None:
    parallel, dtype = config.megatron_cfg, torch_dtype(config.precision)
    provider.tensor_model_parallel_size = parallel.tensor_model_parallel_size
    provider.pipeline_model_parallel_size = parallel.pipeline_model_parallel_size
    provider.num_layers_in_first_pipeline_stage = parallel.num_layers_in_first_pipeline_stage
    provider.num_layers_in_last_pipeline_stage = parallel.num_layers_in_last_pipeline_stage
    provider.context_parallel_size, provider.cp_comm_type = parallel.context_parallel_size, parallel.cp_comm_type
    provider.expert_model_parallel_size = parallel.expert_model_parallel_size
    provider.sequence_parallel = parallel.sequence_parallel
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


def _set_gpu_kernels(provider: Any, options: MegatronConfig) -> None:
    # Without fusion, packed sequences are rotated one by one, in Python.
    provider.apply_rope_fusion = True
    # megatron-bridge sets it for some models only; unfused, the MLP's activation keeps two more copies of its input.
    provider.bias_activation_fusion = provider.gated_linear_unit and provider.activation_func is F.silu
    # megatron-core's output layer needs Apex for it.
    provider.gradient_accumulation_fusion = False
    if provider.num_moe_experts:
        _set_expert_kernels(provider, options)


def _set_expert_kernels(provider: Any, options: MegatronConfig) -> None:
    """Set how the experts of each layer are reached and multiplied. Whether shared experts compute while tokens travel
    is left to the bridge, which knows the model.

    The all-to-all of routed experts is not overlapped with other work. megatron-core's
    `overlap_moe_expert_parallel_comm` runs a forward pass next to the backward pass of the micro-batch before: two
    micro-batches have activations at a time, and a schedule plan takes the place of the `forward` of `one_pass`. Its
    `overlap_dispatch_backward_with_experts_wgrad` is for its FSDP: it computes gradients of experts after the hooks
    that add them to the gradient buffers of its DistributedDataParallel.
    """
    provider.moe_grouped_gemm = options.moe_grouped_gemm
    provider.moe_permute_fusion = options.moe_permute_fusion
    provider.moe_router_fusion = options.moe_router_fusion


def _set_cpu_kernels(provider: Any) -> None:
    from megatron.bridge.models.gpt_provider import local_layer_spec

    provider.transformer_layer_spec = local_layer_spec
    provider.use_cpu_initialization = True
    for fusion in _FUSIONS:
        setattr(provider, fusion, False)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelPlace:
    """A rank's place in the parallel layout: its indices, whether it has logits, whether it has the whole model."""

    data_rank: int
    data_size: int
    tensor_rank: int
    pipeline_rank: int
    has_logits: bool
    is_whole: bool
    context_rank: int = 0

    @property
    def reports(self) -> bool:
        """Whether this rank's results stand for its data-parallel replica."""
        return self.has_logits and self.tensor_rank == 0 and self.context_rank == 0


@dataclass
class MegatronModel:
    """The bridge, this rank's model chunks, and the layout."""

    bridge: Any
    chunks: list[Any]
    place: ParallelPlace
    device: torch.device
    half_precision: bool
    keep_logits: bool = False
    """Whether a backward pass finds the logits of its forward pass."""
    lora: Any = None
    """megatron-bridge's description of the adapters, where there are any."""
    trains: bool = True
    """Whether chunks are wrapped, for their gradients (megatron-core's DistributedDataParallel)."""
    context: ContextRanks = field(default_factory=ContextRanks)
    replay: RouterReplay | None = None
    """What tells the routers which experts to take, in a run with router replay."""
    in_engine: SharedFrozenParams = field(default_factory=SharedFrozenParams)
    """The frozen weights that are in the memory of the engine on this device."""

    @cached_property
    def gather(self) -> Gather:
        """What completes the weights after an optimizer step."""
        return Gather(self.chunks)

    @cached_property
    def clock(self) -> PassClock:
        """What measures this rank's passes."""
        return PassClock(self.device, compared=self.place.data_size > 1)

    def finish_gradients(self, *arguments: Any, **options: Any) -> None:
        """megatron-core's `finalize_model_grads`, which ends this rank's own part of a training pass."""
        from megatron.core.distributed import finalize_model_grads

        self.clock.end()
        finalize_model_grads(*arguments, **options)

    @property
    def bare_chunks(self) -> list[Any]:
        return [chunk.module for chunk in self.chunks] if self.trains else self.chunks

    def parameters(self) -> list[Tensor]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def own_parameters(self) -> list[Tensor]:
        """The parameters without those in an engine's memory."""
        return [parameter for parameter in self.parameters() if parameter not in self.in_engine]

    def state(self) -> list[Tensor]:
        """What a forward pass depends on: parameters, and buffers such as the biases that balance experts."""
        return self.parameters() + [buffer for chunk in self.bare_chunks for buffer in chunk.buffers()]

    def train_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)


def build_model(
    config: PolicyConfig, path: str, on_gpu: bool, timeout_s: float, seed: int, trains: bool = True
) -> MegatronModel:
    """Start torch.distributed and model parallelism, build the model, load its weights.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in the environment. On the first GPU that this process sees,
    with Transformer Engine's layers, or on the CPU. Logits, loss and export agree with the Hugging Face model for any
    tensor, pipeline and data parallel size. A model that does not train has no gradients.
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
    adapted: Any = adapters(parallel.peft) if parallel.peft.enabled else None
    in_graphs = on_gpu and parallel.cuda_graph_impl != "none"

    def before_wrapping(bare: list[Any]) -> list[Any]:
        """Add adapters and freeze weights before gradient buffers are made, so that frozen weights get none. The stream
        of these buffers is chosen then, too."""
        if adapted is not None:
            bridge.load_hf_weights(bare)
            bare = adapted(bare)
        if in_graphs:
            bare = accumulate_where_recorded(bare)
        return moe.freeze(bare) if parallel.freeze_moe_router else bare

    chunks = provider.provide_distributed_model(
        ddp_config=ddp_config(parallel, parallel_state.get_data_parallel_world_size(with_context_parallel=True)),
        wrap_with_ddp=trains,
        use_cpu_initialization=not on_gpu,
        pre_wrap_hook=before_wrapping if adapted is not None or parallel.freeze_moe_router or in_graphs else None,
    )
    transformer_engine.leave_random_state(chunks)
    if in_graphs:
        check_recordable(chunks)
    moe.keep_biases_in_float32(chunks)
    if adapted is None:
        bridge.load_hf_weights(chunks)
    activation_offload.add_mlps(chunks, parallel)
    if adapted is not None:
        log.info("LoRA: %d of %d parameters are trained on this rank", *trained_of_all(chunks))
    place = ParallelPlace(
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        has_logits=parallel_state.is_pipeline_last_stage(),
        is_whole=not ParallelDims.of(parallel, dist.get_world_size()).splits_weights,
        context_rank=parallel_state.get_context_parallel_rank(),
    )
    model = MegatronModel(
        bridge,
        chunks,
        place,
        device,
        half_precision=config.precision != "float32",
        keep_logits=keeps_logits(config),
        lora=adapted,
        trains=trains,
        context=context_ranks(),
    )
    if config.router_replay.enabled:
        model.replay = moe.replaying(chunks, parallel, model.context, device)
    if place.has_logits:
        check_scorable(unwrap_model(chunks[-1]))
    return model


def leave_groups() -> None:
    """Leave all process groups, once nobody refers to the model any more. gloo's threads and sockets end with the last
    reference to a group. Collective."""
    from megatron.core import parallel_state

    # Before the groups are destroyed: a CUDA graph of the model uses them.
    gc.collect()
    parallel_state.destroy_model_parallel()
    forget_groups()
    dist.destroy_process_group()


def context_ranks() -> ContextRanks:
    """This rank's place among those that share each sequence."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    return ContextRanks(dist.get_rank(group), dist.get_world_size(group), group)
