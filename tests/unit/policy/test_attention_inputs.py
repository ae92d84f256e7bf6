import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.compat.megatron import gathered_weight
from nemo_rl_lite.policy.attention_inputs import _is_plain

ROOT = Path(__file__).parents[3]


def test_the_kernels_give_what_torch_gives():
    pytest.importorskip("triton")
    # Triton's interpreter runs kernels on a CPU; it must be asked for before Triton is imported.
    program = """
import torch
from tests.attention_inputs_cases import SMALL, check

for sizes in SMALL:
    for dtype in (torch.float32, torch.bfloat16):
        for normed in (True, False):
            check(sizes, "cpu", dtype, normed)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def attention(*, norm=None, size=128, groups=8, ranks=2, **settings):
    usual = {"rotary_interleaved": False, "no_rope_freq": None, "attention_output_gate": False, "test_mode": False}
    return SimpleNamespace(
        config=SimpleNamespace(num_query_groups=groups, **usual | settings),
        hidden_size_per_attention_head=size,
        world_size=ranks,
        q_layernorm=norm,
        k_layernorm=norm,
    )


def test_layers_with_usual_heads_norms_and_rotations_use_them():
    assert _is_plain(attention()) and _is_plain(attention(norm=torch.nn.RMSNorm(128)))


@pytest.mark.parametrize(
    "own",
    [
        {"norm": torch.nn.LayerNorm(128)},
        {"size": 96},
        {"size": 512},
        {"groups": 1},
        {"rotary_interleaved": True},
        {"no_rope_freq": [0, 1]},
        {"attention_output_gate": True},
    ],
)
def test_other_layers_keep_megatron_cores(own):
    assert not _is_plain(attention(**own))


def test_a_norm_whose_weight_is_centered_at_zero_keeps_megatron_cores():
    norm = torch.nn.RMSNorm(128)
    norm.zero_centered_gamma = True
    assert not _is_plain(attention(norm=norm))


def test_a_weight_that_megatron_core_gathers_is_waited_for():
    norm, waited = torch.nn.RMSNorm(128), []
    norm.register_forward_pre_hook(lambda module, *_: waited.append(module))
    assert gathered_weight(norm) is norm.weight and waited == [norm]
