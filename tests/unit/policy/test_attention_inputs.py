import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.compat.megatron import gathered_weight
from nemo_rl_lite.compat.megatron_cpu import prepare_import
from nemo_rl_lite.policy import attention_inputs
from nemo_rl_lite.policy.attention_inputs import _Inputs, _is_plain, _Separated

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def importable():
    """Make megatron-core importable without a GPU."""
    prepare_import()


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
        {"yarn_rotary_scaling_factor": 4.0},
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


class Layer(torch.nn.Module):
    """An attention layer of one head that megatron-core would rotate."""

    def __init__(self):
        super().__init__()
        self.hidden_size_per_attention_head = 4
        self.num_query_groups_per_partition = self.num_attention_heads_per_partition = 1
        self.q_layernorm = self.k_layernorm = None

    def linear_qkv(self, hidden):
        return hidden, None

    def get_query_key_value_tensors(self, hidden):
        raise AssertionError("the kernels were to be used")

    def forward(self, hidden, rotary_pos_emb, packed_seq_params):
        assert rotary_pos_emb is None
        return self.get_query_key_value_tensors(hidden)


def test_layers_of_a_row_share_its_rotation_which_ends_with_it(monkeypatch):
    given, made = [], []

    def separate(projected, of_query, of_key, cos, sin, heads):
        given.append(cos)
        return (projected.squeeze(1),) * 3

    def rotation(*angles):
        made.append(weakref.ref(cos := torch.ones(3, 2)))
        return cos, cos

    monkeypatch.setattr(_Separated, "apply", separate)
    monkeypatch.setattr(attention_inputs, "rotation", rotation)
    layers, embedding = [Layer(), Layer()], torch.ones(3, 1, 1, 4)
    for layer in layers:
        _Inputs(layer)
    for _ in range(2):
        row = SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3]))
        for layer in (*layers, *layers):
            # Recomputed layers get other objects.
            layer(torch.ones(3, 1, 12), rotary_pos_emb=embedding.detach(), packed_seq_params=row)
    assert [cos is made[number // 4]() for number, cos in enumerate(given)] == [True] * 8
    del row
    given.clear()
    gc.collect()
    assert [cos() for cos in made] == [None] * 2
