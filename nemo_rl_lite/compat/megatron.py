"""megatron-core: saves of optimizers, its CPU optimizer, its manager of offloaded activations.

megatron-bridge: its import, and the export of adapters alone.
"""

import queue
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.megatron_cpu import prepare_import
from nemo_rl_lite.compat.versions import fits, installed, written_for
from nemo_rl_lite.errors import CheckpointError

written_for("megatron-bridge", "0.6", __name__)


def auto_bridge() -> Any:
    """Import megatron-bridge, on a CPU as well; return its class AutoBridge."""
    prepare_import()
    from megatron.bridge import AutoBridge

    return AutoBridge


def adapter_conversions(bridge: Any, chunks: Sequence[Any]) -> list[Any]:
    """Return the bridge's conversions of adapters, each with a task for A and one for B."""
    found = bridge._model_bridge.build_adapter_conversion_tasks(chunks)
    return [conversion for conversions in found.values() for conversion in conversions]


def export_adapters(bridge: Any, chunks: Sequence[Any], conversions: list[Any], on_cpu: bool) -> Iterable[Any]:
    """Export the adapters of these conversions, named as peft names them."""
    # The bridge takes no conversions here. This object is the call's own, so it is patched for this call alone.
    once = bridge._model_bridge
    once.build_adapter_conversion_tasks = lambda *_, **__: {"": conversions}
    return once.stream_adapter_weights_megatron_to_hf(chunks, cpu=on_cpu, show_progress=False)


_RELEASE = "0.19"


written_for("megatron-core", _RELEASE, __name__)


# The method by which a sharded optimizer gathers its states.
_GATHERING = "get_parameter_state_dp_zero"


def hide_wandb() -> None:
    """Hide wandb from this process: megatron-core would import it, for a second, for logs that no one reads."""
    sys.modules["wandb"] = None  # pyrefly: ignore


def forget_groups() -> None:
    """Drop the references to process groups that `destroy_model_parallel` leaves behind."""
    from megatron.core import parallel_state

    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, torch.distributed.ProcessGroup):
            setattr(parallel_state, name, None)


def check_padding(optimizer: Any) -> None:
    """Check that `padded_buckets` knows how this release lays out an optimizer's buckets.

    Raises:
        CheckpointError: another release and a padded bucket, whose states would be those of other parameters.
    """
    buckets = (bucket for part in _sharded(optimizer) for buffer in part.buffers for bucket in buffer.buckets)
    if not fits("megatron-core", _RELEASE) and any(one.numel_unpadded != one.grad_data.numel() for one in buckets):
        raise CheckpointError(
            f"checkpoints complete the padded buckets of megatron-core {_RELEASE}, and {installed('megatron-core')} is "
            "installed; install the version in constraints.txt, or set "
            "policy.megatron_cfg.optimizer.use_distributed_optimizer=false"
        )


@contextmanager
def padded_buckets(optimizer: Any) -> Iterator[None]:
    """Put the gathered states of a sharded optimizer where its parameters lie in the buffer of all buckets.

    megatron-core 0.19 leaves the padding between buckets out of the states, but looks for them there. Where a bucket is
    padded, it would save those of other parameters.
    """
    sharded = _sharded(optimizer)
    for part in sharded:
        setattr(part, _GATHERING, partial(_padded, part.buffers, getattr(part, _GATHERING)))
    try:
        yield
    finally:
        for part in sharded:
            delattr(part, _GATHERING)


def _sharded(optimizer: Any) -> list[Any]:
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if hasattr(part, _GATHERING)]


def _padded(buffers: Any, gather: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what `gather` does, by the number of the buffer, its types and the name of a state, with padding."""
    state = gather(*arguments, **options)
    for number, buffer in enumerate(() if state is None else buffers):
        for of_type in state[number].values():
            for name, values in of_type.items():
                if isinstance(values, Tensor):
                    of_type[name] = _at_their_places(values, buffer)
    return state


def _at_their_places(values: Tensor, buffer: Any) -> Tensor:
    placed, begin = values.new_zeros(buffer.grad_data.numel()), 0
    for bucket in buffer.buckets:
        placed[bucket.offset : bucket.offset + bucket.numel_unpadded] = values[begin : begin + bucket.numel_unpadded]
        begin += bucket.numel_unpadded
    return placed


def async_request(state: dict[str, Any], folder: Path) -> Any:
    """Return megatron-core's AsyncRequest to write a state; a thread of this process is to run it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # megatron-core would start a process to hand results over.
    filesystem_async._results_queue = queue.Queue()  # pyrefly: ignore[bad-assignment]
    return dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")


def staged_writing(request: Any, stage: Callable[[Any], Any]) -> tuple[int, Callable[[], None]] | None:
    """Stage what a request writes, bucket by bucket; return this rank and the function that writes.

    None on a rank whose state other ranks have. A bucket is (file, key, (bytes, tensors)).
    """
    if request.async_fn is None:
        return None
    rank, _, results = request.async_fn_args
    return rank, partial(request.async_fn, rank, [stage(bucket) for bucket in request.preload_fn()], results)


def collect_states(optimizer: Any) -> None:
    """Copy the states and float32 weights of its parts into a CPU optimizer, as a step does."""
    optimizer._sync_sub_optimizers_state_to_hdo()


def forget_classes(optimizer: torch.optim.Optimizer) -> None:
    """Remove the classes of its parts from a CPU optimizer's groups; it also keeps them elsewhere.

    A checkpoint that names classes could not be read without importing and running them.
    """
    for group in optimizer.param_groups:
        for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):
            group.pop(name, None)


def offload_manager() -> Any:
    """Return this process's manager of offloaded activations."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    return PipelineOffloadManager.get_instance()


def micro_batches_in_pattern() -> int:
    """Return the number of micro-batches of the pass that the manager took as its pattern."""
    return len(offload_manager()._cached_chunks_forward)


def learn_pattern_again(buffers: Any) -> None:
    """Let the manager take the next pass as its pattern, with `buffers` in place of its pool of host tensors."""
    type(offload_manager()).reset_instance()
    offload_manager()._cpu_tensor_pool = buffers
