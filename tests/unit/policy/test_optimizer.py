"""An optimizer step, and the states of Transformer Engine's Adam, which are allocated before its step makes copies."""

import math
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.policy.optimizer import allocate_states, take_step


class Adam(torch.optim.Optimizer):
    """Allocates a parameter's state, then copies its moment, as Transformer Engine's Adam."""

    store_param_remainders = True

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.calls = []

    def initialize_state(self, parameter, has_remainders):
        self.calls.append(("state", parameter.dtype, has_remainders))
        self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                self.initialize_state(parameter, False)
            self.calls.append(("copy", parameter.dtype))


def test_all_states_are_allocated_before_the_first_copy():
    own = Adam([torch.zeros(2, dtype=kind) for kind in (torch.bfloat16, torch.float32)])
    own.register_step_pre_hook(allocate_states)
    states = [("state", torch.bfloat16, True), ("state", torch.float32, False)]
    copies = [("copy", torch.bfloat16), ("copy", torch.float32)]
    own.step()
    assert own.calls == states + copies
    own.step()
    assert own.calls == states + copies + copies


class Chain:
    """Subtracts the gradients of two optimizers, of which the second one keeps them apart, in bfloat16."""

    def __init__(self, given):
        self.given, self.weights = given, [torch.zeros(2) for _ in given]
        # The last one has nothing on this rank.
        self.chained_optimizers = [
            self.part(self.weights[:1], False),
            self.part(self.weights[1:], True),
            self.part([], False),
        ]

    def part(self, weights, is_apart):
        config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=is_apart)
        frozen = torch.zeros(1)
        return SimpleNamespace(config=config, get_parameters=lambda: [*weights, frozen])

    def prepare_grads(self):
        self.weights[0].grad = torch.tensor(self.given[0])
        self.weights[1].decoupled_grad = torch.tensor(self.given[1], dtype=torch.bfloat16)

    def gradients(self):
        return [self.weights[0].grad, self.weights[1].decoupled_grad]

    def get_grad_norm(self):
        return torch.cat([one.float() for one in self.gradients()]).norm().view(1)

    def step_with_ready_grads(self):
        for weight, gradient in zip(self.weights, self.gradients(), strict=True):
            weight -= gradient


@pytest.mark.parametrize(("most", "factor"), [(10.0, 1.0), (2.5, 0.5), (None, 1.0)])
def test_gradients_of_all_optimizers_have_at_most_the_norm(most, factor):
    chain = Chain([[3.0, 0.0], [0.0, 4.0]])
    assert take_step(chain, most) == 5
    wanted = [[-3 * factor, 0.0], [0.0, -4 * factor]]
    torch.testing.assert_close([one.tolist() for one in chain.weights], wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("one", [math.nan, math.inf])
def test_nothing_is_updated_if_a_gradient_is_not_finite(one):
    chain = Chain([[3.0, 0.0], [one, 4.0]])
    assert not math.isfinite(take_step(chain, 1.0))
    assert not torch.cat(chain.weights).any()


def test_a_rank_without_gradients_takes_part():
    chain = Chain([])
    chain.prepare_grads, chain.get_grad_norm = (lambda: None), (lambda: torch.tensor([5.0]))
    chain.gradients = list
    assert take_step(chain, 1.0) == 5
