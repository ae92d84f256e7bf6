"""A policy's weights, optimizer and schedule in megatron-core's distributed checkpoints: every rank writes its shards,
and ranks of another layout read the shards that they need."""

import pickle
import queue
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from nemo_rl_lite.checkpoint.digests import digests_of
from nemo_rl_lite.checkpoint.trust import reading_only
from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.offload import cpu_optimizer
from nemo_rl_lite.policy.megatron import saved_optimizer
from nemo_rl_lite.policy.megatron.lora import is_adapter
from nemo_rl_lite.policy.megatron.memory import torch_optimizers
from nemo_rl_lite.policy.megatron.model import MegatronModel

# How megatron-core writes optimizer states, by `checkpoint.resume_layouts`: by parameter, gathered in host memory of
# one rank of each data-parallel group; or each rank writes its share of the optimizer's buckets.
_OPTIMIZER_FORMATS = {
    "any": {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
    },
    "data_parallel": {"distrib_optim_sharding_type": "dp_reshardable"},
}
_FORMAT = "resume_layouts"
# What reading a damaged file may raise.
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
)


class PolicyState:
    """Saves and loads the state that a policy rank resumes from. Every method but `is_written` is collective; all
    components must be on the device. A model with adapters saves these alone; the other weights do not change."""

    def __init__(self, model: MegatronModel, optimizer: Any, scheduler: Any, resume_layouts: str = "any"):
        """`resume_layouts`: the format of saves; `load` reads either."""
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._format = resume_layouts
        self._writing: _Writing | None = None

    def begin_save(self, folder: Path) -> None:
        """Copy the state to host memory and begin to write it to `folder`, which is empty and which all ranks see. Once
        this returns, training may continue.

        Raises:
            RuntimeError: the previous save was not finished.
            CheckpointError: megatron-core cannot save this model or optimizer, or not to this folder.
        """
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if self._writing is not None:
            raise RuntimeError("finish_save comes before the next begin_save")
        self._require_everywhere(folder)
        saved_optimizer.make_states(self._optimizer)
        # megatron-core would start a process to hand results over; here a thread of this process writes.
        filesystem_async._results_queue = queue.Queue()  # pyrefly: ignore[bad-assignment]
        try:
            request = dist_checkpointing.save(
                self._sharded(self._format, is_loading=False),
                str(folder),
                async_sharded_save=True,
                async_strategy="mcore",
            )
        # megatron-core refuses a model or optimizer by an assertion, on all ranks alike.
        except (AssertionError, NotImplementedError, OSError, CheckpointException, CheckpointingException) as error:
            raise CheckpointError(_cause(error)) from error
        self._writing = _Writing(request, folder, self._live_storages())

    def is_written(self) -> bool:
        """Whether this rank has written its shards, or failed to."""
        return self._writing is None or not self._writing.thread.is_alive()

    def finish_save(self) -> dict[str, str]:
        """Wait until all ranks have written and make the folder loadable. Returns the digests of this rank's shards.

        Raises:
            CheckpointError: a rank could not write.
        """
        writing, self._writing = self._writing, None
        return {} if writing is None else writing.finish()

    def load(self, folder: Path) -> None:
        """Resume from what another run, of this layout or another, has saved.

        Raises:
            CheckpointError: there is no checkpoint, or it is another model's.
        """
        saved_optimizer.make_states(self._optimizer)
        state = _read(self._sharded(_format_of(folder), is_loading=True), folder)
        self._put_weights(state)
        # In float32 the main parameters are the model's own, which require a gradient.
        with saved_optimizer.own_settings(self._optimizer, state["optimizer"]), torch.no_grad():
            self._optimizer.load_state_dict(state["optimizer"])
        # Only the number of steps is read from the saved schedule; its shape comes from the configuration.
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=state["scheduler"]["num_steps"])
        saved_optimizer.set_step_counts(self._optimizer)
        saved_optimizer.require_states(self._optimizer)
        if any(cpu_optimizer.is_split(own) for own in torch_optimizers(self._optimizer)):
            saved_optimizer.restore_split(self._optimizer)
            cpu_optimizer.release_copies_of_construction()

    def load_weights(self, folder: Path) -> None:
        """Load the weights alone. Raises CheckpointError as `load` does."""
        self._put_weights(_read(self._sharded_weights(), folder))

    def _put_weights(self, state: dict[str, Any]) -> None:
        for index, chunk in enumerate(self._model.bare_chunks):
            # All weights but the adapters are the starting model's.
            chunk.load_state_dict(state[f"model{index}"], strict=self._model.lora is None)

    def _sharded_weights(self) -> dict[str, Any]:
        models = {}
        for index, chunk in enumerate(self._model.bare_chunks):
            state = chunk.sharded_state_dict()
            kept = self._model.lora is None
            models[f"model{index}"] = {name: value for name, value in state.items() if kept or is_adapter(name)}
        return models

    def _sharded(self, form: str, is_loading: bool) -> dict[str, Any]:
        models = self._sharded_weights()
        whole = {name: value for weights in models.values() for name, value in weights.items()}
        metadata = _OPTIMIZER_FORMATS[form]
        with saved_optimizer.padded_buckets(self._optimizer):
            optimizer = self._optimizer.sharded_state_dict(whole, is_loading=is_loading, metadata=metadata)
        return {**models, "optimizer": optimizer, "scheduler": self._scheduler.state_dict(), _FORMAT: form}

    def _require_everywhere(self, folder: Path) -> None:
        """Raise CheckpointError on all ranks if one of them does not see the folder that the launcher has made."""
        there = torch.tensor(folder.is_dir(), dtype=torch.int32, device=self._model.device)
        dist.all_reduce(there, dist.ReduceOp.MIN)
        if not there:
            raise CheckpointError(f"{folder} is not on a file system that every node sees (hydra.run.dir)")

    def _live_storages(self) -> set[int]:
        """Addresses of the memory that training keeps writing to."""
        tensors = self._model.parameters()
        for chunk in self._model.bare_chunks:
            tensors += chunk.buffers()
        for optimizer in torch_optimizers(self._optimizer):
            tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
            values = [value for state in optimizer.state.values() for value in state.values()]
            tensors += [value for value in values if isinstance(value, Tensor)]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _format_of(folder: Path) -> str:
    """The format of the optimizer states in `folder`; `any` where none is recorded."""
    return str(_reading(folder, lambda: _common_state(folder)).get(_FORMAT, "any"))


def _common_state(folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_common_state_dict(str(folder))


def _read(sharded: dict[str, Any], folder: Path) -> Any:
    from megatron.core import dist_checkpointing

    return _reading(folder, lambda: dist_checkpointing.load(sharded, str(folder)))


def _reading(folder: Path, read: Callable[[], Any]) -> Any:
    """Call `read` so that no code in `folder` can run. Raises CheckpointError."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        with reading_only(folder):
            return read()
    except (CheckpointingException, CheckpointException, pickle.PickleError, *_OF_DAMAGED_FILES) as error:
        raise CheckpointError(f"the policy cannot be read from {folder}: {_cause(error)}") from error


class _Writing:
    """A save in progress: a copy of the state, and the thread that writes it."""

    def __init__(self, request: Any, folder: Path, live: set[int]):
        """`request`: megatron-core's AsyncRequest. `live`: addresses of storages that will change."""
        self._finalize, self._folder = request.finalize_fns, folder
        self._digests: dict[str, str] = {}
        work: Any = _nothing
        if request.async_fn is not None:
            rank, _, results = request.async_fn_args
            staged = [_staged(bucket, live) for bucket in request.preload_fn()]

            def work() -> None:
                request.async_fn(rank, staged, results)
                # Here rather than in the launcher: ranks do it at once, while training continues.
                self._digests = digests_of(folder, folder.glob(f"__{rank}_*"))

        self.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self.thread.start()

    def finish(self) -> dict[str, str]:
        self.thread.join()
        try:
            for finalize in self._finalize:
                finalize()
        except (CheckpointException, OSError) as error:
            raise CheckpointError(f"{_cause(error)}{_free(self._folder)}") from error
        return self._digests


def _cause(error: BaseException) -> str:
    """The error in one line; torch's message has every rank's traceback."""
    lines = str(error).splitlines()
    named = [line.strip() for line in lines if re.match(r"\s*\w+Error: ", line)]
    if isinstance(error, CheckpointException) and not error.failures:
        return "another rank could not write its part"
    return "; ".join(named) or next(iter(lines), "") or type(error).__name__


def _free(folder: Path) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(folder).free / 2**30:.1f} GiB are free there)"
    return ""


def _nothing() -> None:
    """Write nothing, on a rank whose state other ranks have."""


def _staged(bucket: Any, live: set[int]) -> Any:
    """Copy a bucket (file, key, (bytes, tensors)) of megatron-core to host memory. megatron-core itself does not copy
    tensors that are in host memory already, although training keeps writing to them."""
    file, key, (data, tensors) = bucket
    own = [(item, t.clone() if t.untyped_storage().data_ptr() in live else t) for item, t in tensors]
    return file, key, (data, own)
