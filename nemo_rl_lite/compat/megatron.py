"""megatron-core: checkpoints of optimizers, the CPU optimizer, the manager of offloaded activations.

megatron-bridge: its import, and the export of adapters.
"""

import io
import mmap
import queue
import sys
from collections.abc import Buffer, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.serialization import config as torch_format

from nemo_rl_lite.compat.megatron_cpu import prepare_import
from nemo_rl_lite.compat.versions import written_for
from nemo_rl_lite.errors import HostMemoryError

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


written_for(__name__, "megatron-core", "0.19")


# The format that stores the optimizer's states by parameter, and its methods of a distributed optimizer.
STATES_BY_PARAMETER = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_DESCRIBES, _LOADS = "sharded_param_state_fully_reshardable", "load_parameter_state_from_fully_reshardable"


def hide_wandb() -> None:
    """Hide wandb from this process: importing it in megatron-core takes a second, for unused logs."""
    sys.modules["wandb"] = None  # pyrefly: ignore


def forget_groups() -> None:
    """Drop references to process groups that `destroy_model_parallel` keeps."""
    from megatron.core import parallel_state

    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, torch.distributed.ProcessGroup):
            setattr(parallel_state, name, None)


def chained(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, or the optimizer itself."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def has_states_by_parameter(part: Any) -> bool:
    """Return whether an optimizer is a distributed one, whose states `state_format` describes."""
    return hasattr(part, _DESCRIBES)


@contextmanager
def state_format(
    optimizer: Any, functions: Callable[[Any], tuple[Callable[[Any], Any], Callable[[Any], None]]]
) -> Iterator[None]:
    """Let distributed optimizers describe their states for checkpoints, and load them, with other functions within the
    block. `functions` returns both for an optimizer: the first takes the model's sharded state."""
    sharded = [part for part in chained(optimizer) if has_states_by_parameter(part)]
    for part in sharded:
        describe, load = functions(part)
        setattr(part, _DESCRIBES, lambda weights, *_, describe=describe, **__: describe(weights))
        setattr(part, _LOADS, load)
    try:
        yield
    finally:
        for part in sharded:
            delattr(part, _DESCRIBES)
            delattr(part, _LOADS)


def own_states(part: Any) -> Iterator[tuple[Tensor, range, dict[str, Tensor]]]:
    """Yield each parameter with states of a distributed optimizer on this rank: the parameter, the range of its
    elements, and its flat states by name. The main parameter is the state `param`."""
    for ranges in part.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, places in bucket["param_map"].items():
                    states = part._get_main_param_and_optimizer_states(parameter)
                    states.pop("step", None)
                    yield parameter, range(places["param"].start, places["param"].end), states


def put_states(part: Any, states: Iterable[tuple[Tensor, dict[str, Tensor]]]) -> None:
    """Set the states that `own_states` yields for some parameters."""
    for parameter, own in states:
        part._set_main_param_and_optimizer_states(parameter, own)
    if hasattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers"):
        part.optimizer._sync_hdo_state_to_sub_optimizers()


def async_request(state: dict[str, Any], folder: Path, files: int) -> Any:
    """Return megatron-core's AsyncRequest to write a state, for `staged_writing`. Each rank writes up to `files` files.
    Data-parallel ranks divide what they have in common."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    # Otherwise megatron-core starts a process to pass on results.
    filesystem_async._results_queue = queue.Queue()  # pyrefly: ignore[bad-assignment]
    divided: Any = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy(thread_count=files),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    return dist_checkpointing.save(state, str(folder), divided, async_sharded_save=True, async_strategy="mcore")


def staged_writing(
    request: Any, copied: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> Callable[[], dict[str, list[tuple[int, str]]]] | None:
    """Copy a request's tensors to host memory by `copied`. Return the function that writes each file in a thread, and
    returns the lengths and digests of the parts of each file, in order.

    Returns None on a rank without a part of the state. If `copied` raises HostMemoryError, nothing is written, and the
    request's finalizing functions raise it on all ranks.
    """
    if request.async_fn is None:
        return None
    _, buckets, results = request.async_fn_args
    try:
        copies = iter(copied([tensor for *_, (_, own) in buckets for _, tensor in own]))
    except HostMemoryError as error:
        results.put(error)
        return dict[str, list[tuple[int, str]]]
    staged = [(*file, (data, [(item, next(copies)) for item, _ in own])) for *file, (data, own) in buckets]

    def write() -> dict[str, list[tuple[int, str]]]:
        # The digests replace the checksums of torch's format, which hold the interpreter's lock.
        without_checksums = torch_format.patch({"save.compute_crc32": False})  # pyrefly: ignore[missing-attribute]
        with without_checksums, ThreadPoolExecutor(len(staged)) as pool:
            written = [*pool.map(_written, staged)]
        failures = [one for one, _ in written if isinstance(one, Exception)]
        # The request's finalizing functions take the results later.
        results.put(failures[0] if failures else {number: items for number, (items, _) in enumerate(written)})
        return {key: parts for (_, key, _), (_, parts) in zip(staged, written, strict=True)}

    return write


def _written(bucket: Any) -> tuple[Any, list[tuple[int, str]]]:
    """Write a bucket to its file. Return what megatron-core returns, or the error, and the file's parts."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    parts = _Parts()
    answer: Any = FileSystemWriterAsync.write_preloaded_data([parts], 0, bucket, None, None, use_fsync=True)
    return answer[1], [(part.length, part.digest.hexdigest()) for part in parts.begun]


class _Parts:
    """Has megatron-core write each part of a file through a `_Part`."""

    def __init__(self):
        self.begun: list[_Part] = []

    def transform_save_stream(self, _: Any, file: io.BufferedWriter) -> "tuple[_Part, list[str]]":
        """See torch's _StorageWriterTransforms."""
        self.begun.append(_Part(file))
        return self.begun[-1], []


class _Part:
    """Writes to a file, and computes the length and the digest of what it has written."""

    def __init__(self, file: io.BufferedWriter):
        self._file, self.length, self.digest = file, 0, xxhash.xxh3_128()

    def write(self, content: Buffer) -> int:
        self.digest.update(content)
        written = self._file.write(content)
        self.length += written
        return written

    def flush(self) -> None:
        pass

    def close(self) -> None:
        """The file has more parts."""


class PartReader(FileSystemReader):
    """Reads a part of a file at once, and calls `verify` with the file's name, the part's begin, and its content."""

    def __init__(self, folder: str, index: Any, verify: Callable[[str, int, mmap.mmap], None]):
        super().__init__(folder)
        self._index, self._verify = index, verify
        self._last: tuple[tuple[str, int], bytes] = (("", 0), b"")

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        return self._index

    def part(self, file: str, begin: int, length: int) -> mmap.mmap:
        """Return a verified part of a file, in new memory."""
        content = mmap.mmap(-1, length, mmap.MAP_PRIVATE)
        # Some kernels have no huge pages.
        with suppress(OSError):
            content.madvise(mmap.MADV_HUGEPAGE)
        with (Path(self.path) / file).open("rb") as opened:
            opened.seek(begin)
            if opened.readinto(content) < length:
                raise EOFError(f"{file} ends early")
        self._verify(file, begin, content)
        return content

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """Successive tensors may be in the same part."""
        place = (sinfo.relative_path, sinfo.offset)
        if self._last[0] != place:
            # BytesIO shares bytes, and would copy other memory each time.
            self._last = place, bytes(self.part(*place, sinfo.length))
        return io.BytesIO(self._last[1])


@contextmanager
def files_read_by(reader: PartReader) -> Iterator[None]:
    """Let megatron-core read the reader's checkpoint with it within the block."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    before = strategies._get_filesystem_reader
    for module in (serialization, strategies):
        module._get_filesystem_reader = lambda *_, **__: reader  # pyrefly: ignore
    try:
        yield
    finally:
        for module in (serialization, strategies):
            module._get_filesystem_reader = before


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


def exchange_shapes_by_direction() -> None:
    """Let interleaved pipeline stages exchange shapes as they exchange tensors.

    megatron-core matches shapes by their order between two ranks. Two stages send activations and gradients to the same
    rank, so each could mix them up.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    P2PCommunicator._communicate_shapes = _communicate_shapes


def _communicate_shapes(
    self: Any, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
) -> tuple[list[int], list[int]]:
    """Return the shapes of the tensors from both neighbours; zeros for those not wanted."""
    from megatron.core.pipeline_parallel.p2p_communication import _p2p_ops

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {
        name: None if tensor is None else torch.tensor(tensor.shape, device=device)
        for name, tensor in (("tensor_send_next", tensor_send_next), ("tensor_send_prev", tensor_send_prev))
    }
    received = [torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2)]
    wanted = (own if is_wanted else None for own, is_wanted in zip(received, (recv_prev, recv_next), strict=True))
    requests: dict[str, Any] = _p2p_ops(
        **shapes,
        **dict(zip(("tensor_recv_prev", "tensor_recv_next"), wanted, strict=True)),
        group=self.pp_group,
        prev_pipeline_rank=self.prev_rank,
        next_pipeline_rank=self.next_rank,
    )
    for request in requests.values():
        request.wait()
    from_prev, from_next = (own.tolist() for own in received)
    return from_prev, from_next


def fuse_accumulation_without_apex() -> None:
    """Let megatron-core's output layer be built with `gradient_accumulation_fusion` but without Apex.

    Only that layer would need Apex, in its own forward pass. `policy/logprobs.py` multiplies with its weight instead.
    """
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True


def differentiate_swiglu_in_one_pass() -> None:
    """Let Transformer Engine's kernel compute the gradient of SwiGLU in MLPs without biases.

    On an H200 it takes two thirds of the time of the kernel that torch.compile makes of megatron-core's function.
    """
    import transformer_engine_torch  # pyrefly: ignore[missing-import]  # only machines with GPUs have it
    from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        projected = ctx.saved_tensors[0].to(ctx.ori_input_dtype)
        return transformer_engine_torch.dswiglu(gradient.contiguous(), projected, None), None, None

    SwiGLUFunction.backward = staticmethod(backward)  # pyrefly: ignore


def gathered_weight(module: torch.nn.Module) -> Tensor:
    """Return a module's weight, for use without its forward pass. With `overlap_param_gather`, megatron-core waits for
    the weight in a hook before this pass."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    return module.weight  # pyrefly: ignore


def add_norms_in_few_kernels() -> None:
    """Let torch's kernels for many tensors compute the norm of gradients.

    megatron-core wants Transformer Engine's kernel `multi_tensor_scale_tensor`, which release 2.12 lacks. Without it,
    megatron-core launches kernels for each gradient, and waits for each norm.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_of_all


def _norm_of_all(chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], per_tensor: bool) -> Any:
    norms = torch._foreach_norm(tensors[0], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def copy_in_few_kernels() -> None:
    """Let torch's kernels for many tensors copy the parameters of an optimizer step to the model.

    megatron-core launches a kernel for each parameter of a distributed optimizer. A MoE layer has hundreds. Parameters
    that megatron-core quantizes are not supported.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    DistributedOptimizer._copy_main_params_to_model_params = _copy_all  # pyrefly: ignore[bad-assignment]


def _copy_all(part: Any) -> None:
    # Precision-aware optimizers write the model's parameters.
    if part.is_stub_optimizer or part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return
    targets = []
    for parameter in chain(*part.model_float16_groups, *part.model_fp32_groups):
        range_ = part._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        buffer, _, bucket = part.model_param_gbuf_map[parameter]
        whole = part.buffers[buffer].buckets[bucket].param_data
        targets.append(whole.view(-1)[range_.start : range_.end])
    masters = [*chain(*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)]
    if targets:
        torch._foreach_copy_(targets, masters)


def leave_sorted_tokens(chunks: Sequence[Any]) -> None:
    """Skip the sort of tokens by expert on ranks that have all experts, where permuted tokens are sorted already.

    megatron-core's all-to-all dispatcher sorts, which copies all tokens twice in each direction.
    """
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.sort_chunks_by_idxs = _sorted_chunks  # pyrefly: ignore[bad-assignment]
    for module in (module for chunk in chunks for module in chunk.modules()):
        own: Any = getattr(module, "token_dispatcher", None)
        if type(own) is token_dispatcher.MoEAlltoAllTokenDispatcher and own.tp_size * own.ep_size == 1:
            own.sort_input_by_local_experts = None  # pyrefly: ignore[bad-assignment]
            own.restore_output_by_local_experts = None  # pyrefly: ignore[bad-assignment]


def _sorted_chunks(
    input: Tensor,
    split_sizes: Tensor,
    sorted_idxs: Tensor | None,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

    if sorted_idxs is None:
        return input, probs
    return sort_chunks_by_idxs(input, split_sizes, sorted_idxs, probs, fused)


def leave_queries_unnormalized() -> None:
    """Build latent attention without compressed queries as published models have it: their query projection has no
    norm. megatron-core would fuse one into it, with a weight that megatron-bridge does not know."""
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver as Resolver

    fused = Resolver._mla_fused_linear_or_default

    def chosen(resolver: Any, module: Any, name: str) -> Any:
        return (resolver._non_fused_or_default if name == "linear_q_proj" else partial(fused, resolver))(module, name)

    Resolver._mla_fused_linear_or_default = chosen  # pyrefly: ignore[bad-assignment]


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
