"""A rank of checkpoint_rank.py with megatron-core's CPU optimizer, on a machine whose CPU stands for the GPU too."""

import dataclasses
import importlib
import re
import sys

from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

from nemo_rl_lite.compat import megatron_cpu
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.policy import optimizer as cpu_optimizer
from nemo_rl_lite.validation.compose import compose_config
from tests.functional import checkpoint_rank, rank

# Every parameter is on the device until it is copied to the host, and nothing is pinned.
RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"for param in params if param\.is_cuda\]", "for param in params]"),
        (r"offload_threshold and param\.is_cuda:", "offload_threshold:"),
        (r"if param\.is_cuda:\n( +)gpu_group", r"if not cpu_copy:\n\1gpu_group"),
        (r"\.cpu\(\)\.pin_memory\(\)", ""),
        (r"pin_memory=self\.pin_cpu_grads, ", ""),
        (r"self\._(d2h|h2d)_stream\.record_event\(\)", "torch.cpu.Event()"),
    )
)
ASKED_FOR = "offload=cpu_optimizer"


def compose(arguments: list[str]) -> Config:
    """The rules refuse it on CPUs."""
    config = compose_config([argument for argument in arguments if argument != ASKED_FOR])
    if ASKED_FOR not in arguments:
        return config
    megatron = config.policy.megatron_cfg
    optimizer = dataclasses.replace(megatron.optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    policy = dataclasses.replace(config.policy, megatron_cfg=dataclasses.replace(megatron, optimizer=optimizer))
    return dataclasses.replace(config, policy=policy)


def stand_in_for_a_gpu() -> None:
    """Import megatron-core's CPU optimizer again with the rules above."""
    megatron_cpu._RULES += RULES
    again = importlib.reload(hybrid_optimizer)
    for module in (optimizer, distrib_optimizer):
        module.HybridDeviceOptimizer = again.HybridDeviceOptimizer


if __name__ == "__main__":
    stand_in_for_a_gpu()
    # As with Transformer Engine, the step is saved with the group.
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    cpu_optimizer.release_copies_of_construction = lambda: None
    rank.compose_config = compose
    checkpoint_rank.main(*sys.argv[1:])
