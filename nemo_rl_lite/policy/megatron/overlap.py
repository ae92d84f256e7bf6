"""What data-parallel replicas exchange while they compute: gradients during the backward pass, and the weights that an
optimizer step leaves sharded during the next training step's forward pass."""

from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.config.sections.policy import MegatronConfig


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
