"""Builds a megatron-core model on this rank from a Hugging Face folder, through megatron-bridge."""

import gc
import logging
import math
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.compat import transformer_engine
from nemo_rl_lite.compat.bridge import auto_bridge
from nemo_rl_lite.config.automatic import keeps_logits
from nemo_rl_lite.config.parallel import ParallelDims
from nemo_rl_lite.config.sections.policy import PolicyConfig
from nemo_rl_lite.offload import activations
from nemo_rl_lite.policy.megatron import lora, recordable, routers
from nemo_rl_lite.policy.megatron.context import ContextRanks, check_shareable
from nemo_rl_lite.policy.megatron.overlap import Gather, ddp_config
from nemo_rl_lite.policy.megatron.pass_clock import PassClock
from nemo_rl_lite.policy.megatron.provider import set_fields
from nemo_rl_lite.policy.megatron.replay import RouterReplay
from nemo_rl_lite.policy.megatron.scores import check_scorable
from nemo_rl_lite.refit.transport.one_copy import InEngine

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
    in_engine: InEngine = field(default_factory=InEngine)
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
    adapted: Any = lora.adapters(parallel.peft) if parallel.peft.enabled else None
    in_graphs = on_gpu and parallel.cuda_graph_impl != "none"

    def before_wrapping(bare: list[Any]) -> list[Any]:
        """Add adapters and freeze weights before gradient buffers are made, so that frozen weights get none. The stream
        of these buffers is chosen then, too."""
        if adapted is not None:
            bridge.load_hf_weights(bare)
            bare = adapted(bare)
        if in_graphs:
            bare = recordable.accumulate_where_recorded(bare)
        return routers.freeze(bare) if parallel.freeze_moe_router else bare

    chunks = provider.provide_distributed_model(
        ddp_config=ddp_config(parallel, parallel_state.get_data_parallel_world_size(with_context_parallel=True)),
        wrap_with_ddp=trains,
        use_cpu_initialization=not on_gpu,
        pre_wrap_hook=before_wrapping if adapted is not None or parallel.freeze_moe_router or in_graphs else None,
    )
    transformer_engine.leave_random_state(chunks)
    if in_graphs:
        recordable.check_recordable(chunks)
    routers.keep_biases_in_float32(chunks)
    if adapted is None:
        bridge.load_hf_weights(chunks)
    activations.add_mlps(chunks, parallel)
    if adapted is not None:
        log.info("LoRA: %d of %d parameters are trained on this rank", *lora.trained_of_all(chunks))
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
        model.replay = routers.replaying(chunks, parallel, model.context, device)
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
    # megatron-core 0.19 keeps two of its groups.
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    dist.destroy_process_group()


def context_ranks() -> ContextRanks:
    """This rank's place among those that share each sequence."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    return ContextRanks(dist.get_rank(group), dist.get_world_size(group), group)
