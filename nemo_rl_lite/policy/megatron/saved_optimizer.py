"""Completes what megatron-core's checkpoints lack for some optimizers: states that do not exist yet, step counts, and
the two parts of its CPU optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.megatron import collect_states
from nemo_rl_lite.offload import cpu_optimizer
from nemo_rl_lite.policy.megatron.memory import torch_optimizers

_ADAM = (torch.optim.Adam, torch.optim.AdamW)
# Entries of a parameter group that are not settings.
_NO_SETTINGS = {"params", "step"}
# Settings that are the same in every group.
_LEARNING_RATES = ("max_lr", "min_lr")


def make_states(optimizer: Any) -> None:
    """Make the states that a first step would make, into which a checkpoint is read. megatron-core does so for its own
    optimizers, not for torch's."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.init_state_fn = part.init_state_fn or _make_nothing
    for own in torch_optimizers(optimizer):
        is_split = cpu_optimizer.is_split(own)
        for part in cpu_optimizer.parts(own):
            # Other optimizers would take an empty state for one that exists.
            if is_split or isinstance(part, (*_ADAM, torch.optim.SGD)):
                for group, parameter in _parameters(part):
                    if not part.state.get(parameter):
                        part.state[parameter] = _first_state(part, group, parameter)
        if is_split:
            collect_states(own)


@contextmanager
def own_settings(optimizer: Any, saved: dict[str, Any]) -> Iterator[None]:
    """Within the block, groups keep their own settings (learning rate, betas, decay, ...) while `saved` is read, and
    only parameters' states and step counts change. megatron-core also distinguishes groups by their learning rates."""
    settings = [{key: group[key] for key in group.keys() - _NO_SETTINGS} for group in _groups(optimizer)]
    rates = {key: value for own in settings for key, value in own.items() if key in _LEARNING_RATES}
    for group in _saved_groups(saved):
        group.update({key: rates[key] for key in rates.keys() & group.keys()})
    yield
    for group, kept in zip(_groups(optimizer), settings, strict=True):
        group.update(kept)


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    for own in torch_optimizers(optimizer):
        yield from own.param_groups


def _saved_groups(saved: Any) -> Iterator[dict[str, Any]]:
    """Yield the groups of one optimizer or several, however they are nested."""
    if isinstance(saved, dict):
        yield from saved.get("param_groups", ())
        for value in saved.values():
            yield from _saved_groups(value)


def require_states(optimizer: Any) -> None:
    """Raise RuntimeError where an Adam would begin with moments of zero."""
    for part in _stepping(optimizer):
        missing = any("exp_avg" not in part.state.get(parameter, {}) for _, parameter in _parameters(part))
        if "Adam" in type(part).__name__ and missing:
            raise RuntimeError("megatron-core has read a checkpoint and left out optimizer states")


def restore_split(optimizer: Any) -> None:
    """Copy the states of megatron-core's CPU optimizer, which are read as views of all ranks' states of a parameter:
    the views would keep the whole in memory."""
    for own in filter(cpu_optimizer.is_split, torch_optimizers(optimizer)):
        for part in cpu_optimizer.parts(own):
            for state in part.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
                        state[name] = value.clone()


def set_step_counts(optimizer: Any) -> None:
    """Give each parameter of torch's Adam its own step count. megatron-core reads the step into the group, and leaves
    parameters without a count or with one shared counter, which each parameter would increase. In its CPU optimizer it
    would reset the GPU part's count to the group's at each step."""
    for own in torch_optimizers(optimizer):
        for part in cpu_optimizer.parts(own):
            for group, parameter in _parameters(part):
                state = part.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = torch.full_like(state["step"], group.get("step", state["step"].item()))
        if cpu_optimizer.is_split(own):
            for group in own.param_groups:
                group.pop("step", None)


def _stepping(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [part for own in torch_optimizers(optimizer) for part in cpu_optimizer.parts(own)]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield each parameter with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _make_nothing(optimizer: Any, config: Any = None) -> None:
    """Stand in for the function by which megatron-core makes an optimizer's states."""


def _first_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before the optimizer's first step."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": torch.zeros_like(parameter.data)} if group["momentum"] else {}
    moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
    # Other optimizers count steps in the group.
    return {"step": torch.zeros(()), **moments} if isinstance(optimizer, _ADAM) else moments
