"""A policy's weights, optimizer and schedule in megatron-core's distributed checkpoints: every rank writes its shards,
and ranks of another layout read the shards that they need."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.compat.megatron import check_padding, padded_buckets
from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.offload import cpu_optimizer
from nemo_rl_lite.policy.megatron import saved_optimizer
from nemo_rl_lite.policy.megatron.checkpoint_files import Writing, read, read_common
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


class PolicyState:
    """Saves and loads the state that a policy rank resumes from. Every method but `is_written` is collective; all
    components must be on the device. A model with adapters saves these alone; the other weights do not change."""

    def __init__(self, model: MegatronModel, optimizer: Any, scheduler: Any, resume_layouts: str = "any"):
        """`resume_layouts`: the format of saves; `load` reads either.

        Raises:
            CheckpointError: see `check_padding`.
        """
        check_padding(optimizer)
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._format = resume_layouts
        self._writing: Writing | None = None

    def begin_save(self, folder: Path) -> None:
        """Copy the state to host memory and begin to write it to `folder`, which is empty and which all ranks see. Once
        this returns, training may continue.

        Raises:
            RuntimeError: the previous save was not finished.
            CheckpointError: megatron-core cannot save this model or optimizer, or not to this folder.
        """
        if self._writing is not None:
            raise RuntimeError("finish_save comes before the next begin_save")
        self._require_everywhere(folder)
        saved_optimizer.make_states(self._optimizer)
        self._writing = Writing(lambda: self._sharded(self._format, is_loading=False), folder, self._live_storages)

    def is_written(self) -> bool:
        """Whether this rank has written its shards, or failed to."""
        return self._writing is None or self._writing.is_done

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
        state = read(self._sharded(_format_of(folder), is_loading=True), folder)
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
        self._put_weights(read(self._sharded_weights(), folder))

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
        with padded_buckets(self._optimizer):
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
    return str(read_common(folder).get(_FORMAT, "any"))
