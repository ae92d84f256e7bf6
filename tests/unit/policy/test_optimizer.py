"""States of Transformer Engine's Adam are allocated before its step makes copies."""

import torch

from nemo_rl_lite.policy.optimizer import allocate_states


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
