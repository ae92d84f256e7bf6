"""megatron-core: checkpoints of optimizers, the CPU optimizer, the manager of offloaded activations.

megatron-bridge: its import, and the export of adapters.
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

written_for(__name__, "megatron-bridge", "0.6")


def auto_bridge() -> Any:
    """Import megatron-bridge, also on a CPU; return its AutoBridge."""
    prepare_import()
    from megatron.bridge import AutoBridge

    return AutoBridge


def adapter_conversions(bridge: Any, chunks: Sequence[Any]) -> list[Any]:
    """Return the bridge's conversions of adapters, each with tasks for A and B."""
    found = bridge._model_bridge.build_adapter_conversion_tasks(chunks)
    return [conversion for conversions in found.values() for conversion in conversions]


def export_adapters(bridge: Any, chunks: Sequence[Any], conversions: list[Any], on_cpu: bool) -> Iterable[Any]:
    """Export the adapters of these conversions, with PEFT's names."""
    # The bridge takes no conversions as arguments. `_model_bridge` is a new object, so the patch is local.
    once = bridge._model_bridge
    once.build_adapter_conversion_tasks = lambda *_, **__: {"": conversions}
    return once.stream_adapter_weights_megatron_to_hf(chunks, cpu=on_cpu, show_progress=False)


def load_weights(bridge: Any, chunks: Sequence[Any], tasks: Sequence[Any]) -> None:
    """Load the starting model's weights of these conversion tasks."""
    # As in `export_adapters`, the bridge takes no tasks as arguments.
    once = bridge._model_bridge
    once.build_conversion_tasks = lambda *_, **__: tasks
    once._with_progress_tracking = lambda tasks, *_, **__: tasks
    once.load_weights_hf_to_megatron(bridge.hf_pretrained, chunks)


_RELEASE = "0.19"

written_for(__name__, "megatron-core", _RELEASE)

# The method by which a sharded optimizer gathers its states.
_GATHERING = "get_parameter_state_dp_zero"


def hide_wandb() -> None:
    """Hide wandb from this process: importing it in megatron-core takes a second, for unused logs."""
    sys.modules["wandb"] = None  # pyrefly: ignore


def forget_groups() -> None:
    """Drop references to process groups that `destroy_model_parallel` keeps."""
    from megatron.core import parallel_state

    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, torch.distributed.ProcessGroup):
            setattr(parallel_state, name, None)


def check_padding(optimizer: Any) -> None:
    """Check that `padded_buckets` fits this release.

    Raises:
        CheckpointError: another release with a padded bucket, for which states of the wrong parameters would be saved.
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
    """Insert the padding between buckets into the gathered states of a sharded optimizer.

    megatron-core 0.19 gathers states without padding, but indexes them with it, so it would save wrong states.
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
    """Return the result of `gather` (by buffer, types, name of state) with padding."""
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
    """Return megatron-core's AsyncRequest to write a state, for a thread of this process."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Otherwise megatron-core starts a process to pass on results.
    filesystem_async._results_queue = queue.Queue()  # pyrefly: ignore[bad-assignment]
    return dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")


def staged_writing(request: Any, stage: Callable[[Any], Any]) -> tuple[int, Callable[[], None]] | None:
    """Stage a request's buckets, which are (file, key, (bytes, tensors)); return this rank and the writing function.

    Returns None on a rank without a part of the state.
    """
    if request.async_fn is None:
        return None
    rank, _, results = request.async_fn_args
    return rank, partial(request.async_fn, rank, [stage(bucket) for bucket in request.preload_fn()], results)


def collect_states(optimizer: Any) -> None:
    """Copy the states and float32 weights of a CPU optimizer's parts into it, as a step does."""
    optimizer._sync_sub_optimizers_state_to_hdo()


def forget_classes(optimizer: torch.optim.Optimizer) -> None:
    """Remove classes from a CPU optimizer's groups, which also exist elsewhere.

    Reading a checkpoint with classes would have to import and run code.
    """
    for group in optimizer.param_groups:
        for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):
            group.pop(name, None)


def offload_manager() -> Any:
    """Return this process's manager of offloaded activations."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    return PipelineOffloadManager.get_instance()


def micro_batches_in_pattern() -> int:
    """Return the number of micro-batches in the manager's recorded pattern."""
    return len(offload_manager()._cached_chunks_forward)


def learn_pattern_again(buffers: Any) -> None:
    """Let the manager record the next pass as its pattern, with `buffers` as its pool of host tensors."""
    type(offload_manager()).reset_instance()
    offload_manager()._cpu_tensor_pool = buffers
