"""What checkpoints leave out of optimizers, with torch's own for megatron-core's."""

from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.policy.checkpoint import complete_states, make_states, own_settings


class Split:
    """Like megatron-core's CPU optimizer: two parts, each with its parameter, under groups of both."""

    def __init__(self):
        weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
        self.sub_optimizers = [torch.optim.AdamW([weight]) for weight in weights]
        self.defaults, self.collected = {"fused": True}, 0
        self.param_groups = [{"params": weights, "lr": 1e-5, "step": 5}]

    def _sync_sub_optimizers_state_to_hdo(self):
        self.collected += 1


def wrapped(own):
    return SimpleNamespace(optimizer=own, init_state_fn=None)


def test_states_that_a_first_step_would_make_are_there_in_both_parts():
    own = Split()
    optimizer = wrapped(own)
    with pytest.raises(RuntimeError, match="did not read the optimizer states"):
        complete_states(optimizer)
    make_states(optimizer)
    complete_states(optimizer)
    assert own.collected == 1 and optimizer.init_state_fn is not None
    for part in own.sub_optimizers:
        (state,) = part.state.values()
        assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()
        state["exp_avg"] += 1
    make_states(optimizer)
    assert all(state["exp_avg"].all() for part in own.sub_optimizers for state in part.state.values())


def test_each_part_counts_on_from_the_step_that_was_read():
    own = Split()
    make_states(wrapped(own))
    for part in own.sub_optimizers:
        part.param_groups[0]["step"] = 5
    complete_states(wrapped(own))
    assert [float(state["step"]) for part in own.sub_optimizers for state in part.state.values()] == [5, 5]
    # It would be given to the parts before every step.
    assert "step" not in own.param_groups[0]


def test_states_do_not_keep_those_of_other_ranks_in_memory():
    own = Split()
    make_states(wrapped(own))
    everyones = torch.arange(12.0)
    for part in own.sub_optimizers:
        (state,) = part.state.values()
        state["exp_avg"] = everyones[3:6]
    complete_states(wrapped(own))
    for part in own.sub_optimizers:
        (state,) = part.state.values()
        assert state["exp_avg"].tolist() == [3, 4, 5] and state["exp_avg"].untyped_storage().nbytes() == 12


def test_settings_are_the_configurations_and_steps_those_that_were_saved():
    own = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.5, betas=(0.5, 0.6))
    own.param_groups[0].update(max_lr=0.5, min_lr=0.0)
    saved_group = {"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "max_lr": 0.1, "min_lr": 0.1, "step": 7}
    saved = {0: {"optimizer": {"param_groups": [saved_group]}}, "more": [1]}
    with own_settings(wrapped(own), saved):
        # megatron-core distinguishes groups by it.
        assert (saved_group["max_lr"], saved_group["min_lr"]) == (0.5, 0.0)
        # What another kind of optimizer has not saved.
        own.param_groups = [saved_group]
    (group,) = own.param_groups
    assert (group["lr"], group["betas"], group["step"], group["fused"]) == (0.5, (0.5, 0.6), 7, None)
