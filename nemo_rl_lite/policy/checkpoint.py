"""Save and load a policy's weights, optimizer and schedule as megatron-core's distributed checkpoints.

Each rank writes its shards in a thread. Ranks of any layout read the shards that they need, without running code from
the files. For some optimizers, megatron-core's checkpoints lack states before the first step, step counts, or parts
of its CPU optimizer; this module adds them.
"""

import os
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from nemo_rl_lite.checkpoint.store import digests_of
from nemo_rl_lite.compat.megatron import async_request, check_padding, collect_states, padded_buckets, staged_writing
from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.policy import optimizer as cpu_optimizer
from nemo_rl_lite.policy.memory import torch_optimizers
from nemo_rl_lite.policy.model import MegatronModel, is_adapter
from nemo_rl_lite.policy.reference import Reference

# megatron-core's formats of optimizer states, by `checkpoint.resume_layouts`: by parameter, gathered in host memory of
# one rank per data-parallel group; or each rank's share of the optimizer's buckets.
_OPTIMIZER_FORMATS = {
    "any": {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": True},
    "data_parallel": {"distrib_optim_sharding_type": "dp_reshardable"},
}
_FORMAT, _REFERENCE = "resume_layouts", "has_reference"
# torch.distributed.checkpoint's index.
INDEX_FILE = ".metadata"
# Overrides torch.distributed.checkpoint's weights_only=False.
_TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# The names that an index may contain, in addition to torch's constants.
_METADATA = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
    *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
# From torch 2.13 on, also of the ranks' plans.
_PLAN = ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA),
    *(("torch.distributed.checkpoint.planner", name) for name in _PLAN),
}
# Errors from reading a damaged file.
_OF_DAMAGED_FILES = (
    OSError,
    RuntimeError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
    pickle.PickleError,
    CheckpointException,
)
_ADAM = (torch.optim.Adam, torch.optim.AdamW)


class PolicyState:
    """State that a policy rank saves and resumes from. With LoRA, only adapters are saved, because other weights do not
    change; a reference policy is saved once it has moved. All methods except `is_written` are collective; all
    components must be on the device."""

    def __init__(
        self,
        model: MegatronModel,
        optimizer: Any,
        scheduler: Any,
        resume_layouts: str = "any",
        reference: Reference | None = None,
    ):
        """`resume_layouts`: the format of saves; `load` reads both. Raises CheckpointError: see `check_padding`."""
        check_padding(optimizer)
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._format, self._reference = resume_layouts, reference
        self._writing: _Writing | None = None

    def begin_save(self, folder: Path) -> None:
        """Copy the state to host memory and start to write it to `folder`, which is empty and visible to all ranks.
        Training may continue when this returns.

        Raises:
            RuntimeError: the previous save was not finished.
            CheckpointError: megatron-core cannot save this model or optimizer, or not to this folder.
        """
        if self._writing is not None:
            raise RuntimeError("call finish_save before the next begin_save")
        is_visible = torch.tensor(folder.is_dir(), dtype=torch.int32, device=self._model.device)
        dist.all_reduce(is_visible, dist.ReduceOp.MIN)
        if not is_visible:
            raise CheckpointError(f"{folder} is not on a file system that every node sees (hydra.run.dir)")
        make_states(self._optimizer)
        from megatron.core.dist_checkpointing.core import CheckpointingException

        try:
            moved = self._reference is not None and self._reference.has_moved
            request = async_request(self._sharded(self._format, moved, is_loading=False), folder)
        # megatron-core rejects a model or optimizer with an assertion, on all ranks.
        except (AssertionError, NotImplementedError, OSError, CheckpointException, CheckpointingException) as error:
            raise CheckpointError(_cause(error)) from error
        self._writing = _Writing(request, folder, self._live_storages())

    def is_written(self) -> bool:
        """Return whether this rank's thread has ended."""
        return self._writing is None or not self._writing.thread.is_alive()

    def finish_save(self) -> dict[str, str]:
        """Wait for all ranks and make the folder loadable. Returns the digests of this rank's shards. Raises
        CheckpointError: a rank could not write."""
        writing, self._writing = self._writing, None
        return {} if writing is None else writing.finish()

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint of any layout. Raises CheckpointError: there is none, or it is of another model."""
        from megatron.core import dist_checkpointing

        make_states(self._optimizer)
        with reading(folder):
            common = dist_checkpointing.load_common_state_dict(str(folder))
        with_reference = self._reference is not None and bool(common.get(_REFERENCE, False))
        form = str(common.get(_FORMAT, "any"))
        state = _read(self._sharded(form, with_reference, is_loading=True), folder)
        self._put_weights(state)
        if self._reference is not None and with_reference:
            self._reference.load(state)
        # In float32 the main parameters are the model's, which require a gradient.
        with own_settings(self._optimizer, state["optimizer"]), torch.no_grad():
            self._optimizer.load_state_dict(state["optimizer"])
        # The schedule itself comes from the configuration.
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=state["scheduler"]["num_steps"])
        complete_states(self._optimizer)
        if any(cpu_optimizer.is_split(own) for own in torch_optimizers(self._optimizer)):
            cpu_optimizer.release_copies_of_construction()

    def load_weights(self, folder: Path) -> None:
        """Load only the weights. Raises CheckpointError as `load` does."""
        self._put_weights(_read(self._sharded_weights(), folder))

    def _put_weights(self, state: dict[str, Any]) -> None:
        for index, chunk in enumerate(self._model.bare_chunks):
            # With LoRA the checkpoint has only the adapters.
            chunk.load_state_dict(state[f"model{index}"], strict=self._model.lora is None)

    def _sharded_weights(self) -> dict[str, Any]:
        everything, states = self._model.lora is None, [one.sharded_state_dict() for one in self._model.bare_chunks]
        return {
            f"model{index}": {name: one for name, one in state.items() if everything or is_adapter(name)}
            for index, state in enumerate(states)
        }

    def _sharded(self, form: str, with_reference: bool, is_loading: bool) -> dict[str, Any]:
        models = self._sharded_weights()
        whole = {name: value for weights in models.values() for name, value in weights.items()}
        metadata = _OPTIMIZER_FORMATS[form]
        with padded_buckets(self._optimizer):
            optimizer = self._optimizer.sharded_state_dict(whole, is_loading=is_loading, metadata=metadata)
        own = {"scheduler": self._scheduler.state_dict(), _FORMAT: form, _REFERENCE: with_reference}
        reference = self._reference.sharded_state() if self._reference is not None and with_reference else {}
        return {**models, "optimizer": optimizer, **own, **reference}

    def _live_storages(self) -> set[int]:
        """Return addresses of memory that training writes to."""
        tensors = self._model.state()
        for optimizer in torch_optimizers(self._optimizer):
            tensors += [parameter for _, parameter in _parameters(optimizer)]
            values = [value for state in optimizer.state.values() for value in state.values()]
            tensors += [value for value in values if isinstance(value, Tensor)]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class _Writing:
    """Save in flight: a copy of the state, and the thread that writes it."""

    def __init__(self, request: Any, folder: Path, changing: set[int]):
        """Copy the state of megatron-core's `request` to host memory, and start to write it to an empty folder.
        `changing`: addresses of storages that training writes to."""
        self._finalize = request.finalize_fns
        self._digests: dict[str, str] = {}

        def staged(bucket: Any) -> Any:
            """Copy a bucket to host memory. megatron-core returns host tensors without a copy; training writes to
            them."""
            file, key, (data, tensors) = bucket
            own = [(item, t.clone() if t.untyped_storage().data_ptr() in changing else t) for item, t in tensors]
            return file, key, (data, own)

        writing = staged_writing(request, staged)

        def work() -> None:
            # None if other ranks write this rank's state.
            if writing is not None:
                rank, write = writing
                write()
                # Ranks compute digests in parallel, while training continues.
                self._digests = digests_of(folder, folder.glob(f"__{rank}_*"))

        self.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self.thread.start()

    def finish(self) -> dict[str, str]:
        self.thread.join()
        try:
            for finalize in self._finalize:
                finalize()
        except (CheckpointException, OSError) as error:
            raise CheckpointError(_cause(error)) from error
        return self._digests


def _read(sharded: dict[str, Any], folder: Path) -> Any:
    """Read this rank's part, described by `sharded`. Raises CheckpointError."""
    from megatron.core import dist_checkpointing

    with reading(folder):
        return dist_checkpointing.load(sharded, str(folder))


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise CheckpointError for errors from reading a checkpoint within the block, and run no code from it."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        with reading_only(folder):
            yield
    except (CheckpointingException, *_OF_DAMAGED_FILES) as error:
        raise CheckpointError(f"the policy cannot be read from {folder}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return the error in one line, without the tracebacks of all ranks in torch's message."""
    lines = str(error).splitlines()
    named = [line.strip() for line in lines if re.match(r"\s*\w+Error: ", line)]
    if isinstance(error, CheckpointException) and not error.failures:
        return "another rank could not write its part"
    return "; ".join(named) or next(iter(lines), "") or type(error).__name__


@contextmanager
def reading_only(folder: Path) -> Iterator[None]:
    """Restrict torch and megatron-core to reading tensors and their index from `folder` within the block. Raises
    CheckpointError: there is no index, or it names other objects."""
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            _IndexOnly(file).load()
    # A damaged pickle may raise anything.
    except Exception as error:
        raise CheckpointError(f"{path} is not a checkpoint's index: {error}") from error
    before = os.environ.get(_TENSORS_ONLY)
    os.environ[_TENSORS_ONLY] = "1"
    try:
        yield
    finally:
        del os.environ[_TENSORS_ONLY]
        if before is not None:
            os.environ[_TENSORS_ONLY] = before


class _IndexOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        constants = (torch.dtype, torch.layout, torch.memory_format)
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), constants)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def make_states(optimizer: Any) -> None:
    """Create the states of a first step, so that a checkpoint can be read into them. megatron-core does so only for
    its own optimizers."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.init_state_fn = part.init_state_fn or (lambda *_, **__: None)
    for own in torch_optimizers(optimizer):
        is_split = cpu_optimizer.is_split(own)
        for part in cpu_optimizer.parts(own):
            # Other optimizers would not initialize an empty state.
            if is_split or isinstance(part, (*_ADAM, torch.optim.SGD)):
                for group, parameter in _parameters(part):
                    if not part.state.get(parameter):
                        part.state[parameter] = _first_state(part, group, parameter)
        if is_split:
            collect_states(own)


def _first_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": torch.zeros_like(parameter.data)} if group["momentum"] else {}
    moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
    # Other optimizers count steps in the group.
    return {"step": torch.zeros(()), **moments} if isinstance(optimizer, _ADAM) else moments


@contextmanager
def own_settings(optimizer: Any, saved: dict[str, Any]) -> Iterator[None]:
    """Keep the groups' settings (learning rate, betas, decay, ...) while `saved` is read within the block: only states
    and step counts change. megatron-core also matches groups by their learning rates."""

    def groups() -> list[dict[str, Any]]:
        return [group for own in torch_optimizers(optimizer) for group in own.param_groups]

    settings = [{key: group[key] for key in group.keys() - {"params", "step"}} for group in groups()]
    # These are the same in all groups.
    rates = {key: own[key] for own in settings for key in ("max_lr", "min_lr") if key in own}
    for group in _saved_groups(saved):
        group.update({key: rates[key] for key in rates.keys() & group.keys()})
    yield
    for group, kept in zip(groups(), settings, strict=True):
        group.update(kept)


def _saved_groups(saved: Any) -> Iterator[dict[str, Any]]:
    """Yield the groups of nested optimizers."""
    if isinstance(saved, dict):
        yield from saved.get("param_groups", ())
        for value in saved.values():
            yield from _saved_groups(value)


def complete_states(optimizer: Any) -> None:
    """Complete the optimizer states that megatron-core has read.

    - megatron-core reads the step into the group. Parameters of torch's Adam have no count then, or share one counter
      that each would increase.
    - The group's count would reset the count of a CPU optimizer's GPU part at each step.
    - A CPU optimizer's states are views, which would keep all ranks' states of a parameter in memory.

    Raises RuntimeError: an Adam would start with moments of zero.
    """
    for own in torch_optimizers(optimizer):
        is_split = cpu_optimizer.is_split(own)
        for part in cpu_optimizer.parts(own):
            for group, parameter in _parameters(part):
                state = part.state.get(parameter, {})
                if "Adam" in type(part).__name__ and "exp_avg" not in state:
                    raise RuntimeError("megatron-core did not read the optimizer states of the checkpoint")
                if isinstance(state.get("step"), Tensor):
                    state["step"] = torch.full_like(state["step"], group.get("step", state["step"].item()))
                for name, value in state.items() if is_split else ():
                    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
                        state[name] = value.clone()
        for group in own.param_groups if is_split else ():
            group.pop("step", None)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter
