"""Save and load a policy's weights, optimizer and schedule as megatron-core's distributed checkpoints.

Each rank writes its part of the state in a thread. Ranks of any layout read the parts that they need. For some
optimizers, megatron-core's checkpoints lack states before the first step, step counts, or parts of its CPU optimizer;
this module adds them.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from nemo_rl_lite.checkpoint.store import Part
from nemo_rl_lite.compat.megatron import (
    STATES_BY_PARAMETER,
    async_request,
    chained,
    collect_states,
    has_states_by_parameter,
    staged_writing,
)
from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.offload.host_memory import CudaRegistrar, HostArena, copies_in
from nemo_rl_lite.policy import optimizer as cpu_optimizer
from nemo_rl_lite.policy.checkpoint_reading import first_line, read_common, read_state
from nemo_rl_lite.policy.memory import torch_optimizers
from nemo_rl_lite.policy.model import MegatronModel, is_adapter
from nemo_rl_lite.policy.optimizer import rank_threads
from nemo_rl_lite.policy.optimizer_state import states_by_parameter
from nemo_rl_lite.policy.reference import Reference

_REFERENCE = "has_reference"
_ADAM = (torch.optim.Adam, torch.optim.AdamW)
# A rank's files in a checkpoint, each written by a thread.
_MOST_FILES = 8


class PolicyState:
    """State that a policy rank saves and resumes from. With LoRA, only adapters are saved, because other weights do not
    change; a reference policy is saved once it has moved. All methods except `is_written` are collective; all
    components must be on the device."""

    def __init__(
        self,
        model: MegatronModel,
        optimizer: Any,
        scheduler: Any,
        reference: Reference | None = None,
        registrar: CudaRegistrar | None = None,
    ):
        """`registrar`: pins host memory for the copies of a save."""
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._reference = reference
        self._arena = HostArena("the copies of a checkpoint", registrar)
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
            with states_by_parameter(self._optimizer):
                state = self._sharded(moved, is_loading=False)
            request = async_request(state, folder, files=min(rank_threads(), _MOST_FILES))
        # megatron-core rejects a model or optimizer with an assertion, on all ranks.
        except (AssertionError, NotImplementedError, OSError, CheckpointException, CheckpointingException) as error:
            raise CheckpointError(_cause(error)) from error
        self._writing = _Writing(request, self._live_storages(), self._arena)

    def is_written(self) -> bool:
        """Return whether this rank's thread has ended."""
        return self._writing is None or not self._writing.thread.is_alive()

    def finish_save(self) -> dict[str, list[Part]]:
        """Wait for all ranks and make the folder loadable. Returns the parts of this rank's files, by name. Raises
        CheckpointError: a rank could not write."""
        writing, self._writing = self._writing, None
        try:
            return {} if writing is None else writing.finish()
        finally:
            # Pinned memory is slow to allocate, so it is kept for the next save.
            if not self._arena.locked:
                self._arena.release()

    def release(self) -> None:
        """Free the host memory that is kept between saves. No save is in flight."""
        self._arena.release()

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint of any layout, on all ranks or none. Raises CheckpointError: there is none, it is
        damaged, or it is of another model."""
        make_states(self._optimizer)
        with_reference = self._reference is not None and bool(read_common(folder).get(_REFERENCE, False))
        with states_by_parameter(self._optimizer):
            state = read_state(self._sharded(with_reference, is_loading=True), folder)
            self._put_weights(state)
            state["optimizer"] = chained_alike(self._optimizer, state["optimizer"])
            # In float32 the main parameters are the model's, which require a gradient.
            with own_settings(self._optimizer, state["optimizer"]), torch.no_grad():
                self._optimizer.load_state_dict(state["optimizer"])
        if self._reference is not None and with_reference:
            self._reference.load(state)
        # The schedule itself comes from the configuration.
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=state["scheduler"]["num_steps"])
        complete_states(self._optimizer)
        if any(cpu_optimizer.is_split(own) for own in torch_optimizers(self._optimizer)):
            cpu_optimizer.release_copies_of_construction()

    def load_weights(self, folder: Path) -> None:
        """Load only the weights. Raises CheckpointError as `load` does."""
        self._put_weights(read_state(self._sharded_weights(), folder))

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

    def _sharded(self, with_reference: bool, is_loading: bool) -> dict[str, Any]:
        """Describe the state, within `states_by_parameter`."""
        models = self._sharded_weights()
        optimizer = self._optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=STATES_BY_PARAMETER)
        own = {"scheduler": self._scheduler.state_dict(), _REFERENCE: with_reference}
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

    def __init__(self, request: Any, changing: set[int], arena: HostArena):
        """Copy the state of megatron-core's `request` to host memory, that of a GPU to the arena, and start to write
        it. `changing`: addresses of storages that training writes to."""
        self._finalize = request.finalize_fns
        self._parts: dict[str, list[Part]] = {}

        def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
            """Host tensors that training does not write to need no copy."""
            of_device = iter(copies_in(arena, [one for one in tensors if not one.is_cpu]))
            on_host = [one if one.is_cpu else next(of_device) for one in tensors]
            return [one.clone() if one.untyped_storage().data_ptr() in changing else one for one in on_host]

        writing = staged_writing(request, copied)

        def work() -> None:
            # None if other ranks write this rank's state.
            if writing is not None:
                self._parts = writing()

        self.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self.thread.start()

    def finish(self) -> dict[str, list[Part]]:
        self.thread.join()
        try:
            for finalize in self._finalize:
                finalize()
        except (CheckpointException, OSError) as error:
            raise CheckpointError(_cause(error)) from error
        return self._parts


def _cause(error: BaseException) -> str:
    """Return the error in one line, without the tracebacks of all ranks in torch's message."""
    lines = str(error).splitlines()
    named = [line.strip() for line in lines if re.match(r"\s*\w+Error: ", line)]
    if isinstance(error, CheckpointException) and not error.failures:
        return "another rank could not write its part"
    return "; ".join(named) or first_line(error)


def make_states(optimizer: Any) -> None:
    """Create the states of a first step, so that a checkpoint can be read into them. megatron-core does so only for
    its own optimizers."""
    for part in chained(optimizer):
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


def chained_alike(optimizer: Any, saved: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state that was read for this optimizer in its form. With expert parallelism, megatron-core chains two
    optimizers, the second one for the experts. The states of parameters do not depend on it, but the settings do.

    Raises CheckpointError: the optimizer cannot read the other form.
    """
    # megatron-core numbers the states of a chain, and merges what it has read into the form of this optimizer.
    if len({type(name) for name in saved}) == 1:
        return saved
    parts = chained(optimizer)
    was_one = len(parts) > 1
    if not all(has_states_by_parameter(part) for part in parts):
        raise CheckpointError(
            "without a distributed optimizer, expert parallelism cannot be switched on or off: resume with the "
            "checkpoint's policy.megatron_cfg.expert_model_parallel_size and expert_tensor_parallel_size"
        )
    shared = {name: value for name, value in saved.items() if isinstance(name, str)}
    if not was_one:
        shared = saved[0] | shared
    step = next((group["step"] for group in shared["optimizer"]["param_groups"] if "step" in group), None)
    states = []
    for number, part in enumerate(parts):
        own = part.state_dict()["optimizer"]
        groups = [group if step is None else group | {"step": step} for group in own["param_groups"]]
        read = saved[number] if was_one else {}
        states.append(shared | read | {"optimizer": own | {"param_groups": groups}})
    return states[0] if len(parts) == 1 else dict(enumerate(states))


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
