"""What megatron-core's checkpoints leave out of some optimizers: states that are not there yet, step counts, and the
two parts of its CPU optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.offload import cpu_optimizer
from nemo_rl_lite.policy.megatron.memory import torch_optimizers

_ADAM = (torch.optim.Adam, torch.optim.AdamW)
# What a group has beside them.
_NO_SETTINGS = {"params", "step"}
# Of every group the same.
_LEARNING_RATES = ("max_lr", "min_lr")


def make_states(optimizer: Any) -> None:
    """Make states that a first step would make: megatron-core can make those of its own optimizers before it reads
    them, not those of torch's."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.init_state_fn = part.init_state_fn or _make_nothing
    for own in torch_optimizers(optimizer):
        is_split = cpu_optimizer.is_split(own)
        for part in cpu_optimizer.parts(own):
            # Of others, an empty state would count as had.
            if is_split or isinstance(part, (*_ADAM, torch.optim.SGD)):
                for group, parameter in _parameters(part):
                    if not part.state.get(parameter):
                        part.state[parameter] = _first_state(part, group, parameter)
        if is_split:
            cpu_optimizer.collect_states(own)


@contextmanager
def own_settings(optimizer: Any, saved: dict[str, Any]) -> Iterator[None]:
    """Around reading what was `saved`: groups keep the settings that they have (learning rate, betas, decay, ...), and
    take parameters' states and step counts alone. megatron-core tells groups apart by their learning rates as well."""
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
    """Of an optimizer or several, however they are nested."""
    if isinstance(saved, dict):
        yield from saved.get("param_groups", ())
        for value in saved.values():
            yield from _saved_groups(value)


def require_states(optimizer: Any) -> None:
    """Raises RuntimeError: an Adam would begin with moments of zero."""
    for part in _stepping(optimizer):
        missing = any("exp_avg" not in part.state.get(parameter, {}) for _, parameter in _parameters(part))
        if "Adam" in type(part).__name__ and missing:
            raise RuntimeError("megatron-core has read a checkpoint and left out optimizer states")


def restore_split(optimizer: Any) -> None:
    """Of megatron-core's CPU optimizer it reads states as views of what all ranks have of a parameter, which would stay
    in memory with them."""
    for own in filter(cpu_optimizer.is_split, torch_optimizers(optimizer)):
        for part in cpu_optimizer.parts(own):
            for state in part.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
                        state[name] = value.clone()


def set_step_counts(optimizer: Any) -> None:
    """megatron-core reads the step into the group, and gives the parameters of torch's Adam none of it or one counter
    for all, which would be raised once for each. Of its CPU optimizer it would set the GPU's part back to the group's
    at each step."""
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
    """Each with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _make_nothing(optimizer: Any, config: Any = None) -> None:
    """What megatron-core calls to make an optimizer's states."""


def _first_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """What an optimizer has of a parameter before its first step."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": torch.zeros_like(parameter.data)} if group["momentum"] else {}
    moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
    # Others count in the group.
    return {"step": torch.zeros(()), **moments} if isinstance(optimizer, _ADAM) else moments
