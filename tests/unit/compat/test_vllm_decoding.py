"""Decoding steps use the launcher's kernels only where these compute what vLLM's do."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.platforms.interface import DeviceCapability, Platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder

from nemo_rl_lite.compat import vllm_decoding
from nemo_rl_lite.compat.vllm_decoding import (
    all_plain,
    allow_own_attention,
    is_decoding,
    is_plain,
    replace_attention,
)
from nemo_rl_lite.config.engines import chosen_attention

STEP = {
    "max_query_len": 1,
    "num_actual_tokens": 3,
    "seq_lens": torch.tensor([5, 7, 0]),
    "causal": True,
    "use_cascade": False,
    "mm_prefix_range_tensor": None,
    "rswa_prefix_lens": None,
}
LAYER = {
    "attn_type": AttentionType.DECODER,
    "head_size": 128,
    "sliding_window": (-1, -1),
    "alibi_slopes": None,
    "sinks": None,
    "logits_soft_cap": 0,
    "kv_cache_dtype": "auto",
    "dcp_world_size": 1,
    "batch_invariant_enabled": False,
    "scale": 0.5,
}


@pytest.mark.parametrize(
    ("change", "decodes"),
    [
        ({}, True),
        ({"max_query_len": 2}, False),
        # Padded requests without tokens.
        ({"num_actual_tokens": 2}, False),
        ({"causal": False}, False),
        ({"use_cascade": True}, False),
        ({"mm_prefix_range_tensor": torch.zeros(1)}, False),
        ({"rswa_prefix_lens": torch.zeros(1)}, False),
    ],
)
def test_decoding_steps(change, decodes):
    assert is_decoding(SimpleNamespace(**STEP | change)) == decodes


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({}, True),
        ({"kv_cache_dtype": "bfloat16", "head_size": 64}, True),
        ({"head_size": 80}, False),
        ({"sliding_window": (127, 0)}, False),
        ({"logits_soft_cap": 30.0}, False),
        ({"kv_cache_dtype": "fp8_e4m3"}, False),
        ({"sinks": torch.zeros(2)}, False),
        ({"alibi_slopes": torch.zeros(2)}, False),
        ({"batch_invariant_enabled": True}, False),
        ({"attn_type": AttentionType.ENCODER_ONLY}, False),
        ({"dcp_world_size": 2}, False),
    ],
)
def test_plain_layers(change, plain):
    assert is_plain(SimpleNamespace(**LAYER | change)) == plain


@pytest.fixture
def calls(monkeypatch):
    """Calls of the kernel, of FlashAttention and of its metadata's builder."""
    seen = []
    for owner, name in ((FlashAttentionImpl, "forward"), (FlashAttentionMetadataBuilder, "build")):
        monkeypatch.setattr(owner, name, lambda self, *given, name=name: seen.append((name, given)))
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
    replace_attention(lambda *given: seen.append(("kernel", given)))
    return seen


@pytest.mark.parametrize(
    ("step", "layer", "name"),
    [({}, {}, "kernel"), ({"max_query_len": 9}, {}, "forward"), ({}, {"head_size": 80}, "forward")],
)
def test_other_batches_and_layers_keep_flash_attention(calls, step, layer, name):
    impl = object.__new__(FlashAttentionImpl)
    vars(impl).update(LAYER | layer)
    metadata = SimpleNamespace(**STEP | step, block_table=torch.zeros(3, 2))
    query = torch.zeros(4, 2, 128)
    impl.forward(None, query, query, query, torch.zeros(1), metadata, query.clone())
    ((found, given),) = calls
    assert found == name
    if found == "kernel":
        # The fourth row belongs to no request.
        assert given[0].shape == given[5].shape == (3, 2, 128) and given[4] == 0.5
    assert FlashAttentionMetadataBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(("tokens", "layer", "skips"), [(1, {}, True), (2, {}, False), (1, {"head_size": 80}, False)])
def test_a_schedule_that_is_not_read_is_not_computed(calls, monkeypatch, tokens, layer, skips):
    layers = {"first": SimpleNamespace(impl=SimpleNamespace(**LAYER | layer))}
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: layers)
    builder = object.__new__(FlashAttentionMetadataBuilder)
    vars(builder).update(vllm_config=None, layer_names=[])
    for _ in range(2):
        builder.build(0, SimpleNamespace(max_query_len=tokens))
    assert [given[2] for _, given in calls] == [skips] * 2 and all_plain(builder) == (not layer)


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, "1"),
        ({"attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1}}, "1"),
        ({"attention_backend": "FLASH_ATTN"}, "0"),
        ({"attention_config": {"backend": "FLASH_ATTN"}}, "0"),
        # vLLM rejects it at the engine's start.
        ({"attention_config": 5}, "1"),
    ],
)
def test_a_chosen_backend_is_kept(options, own, monkeypatch):
    monkeypatch.delenv(vllm_decoding._ATTENTION, raising=False)
    allow_own_attention(chosen_attention(options) is None)
    assert os.environ[vllm_decoding._ATTENTION] == own


@pytest.mark.parametrize(
    ("is_cuda", "capability", "release", "takes"),
    [
        (True, (9, 0), True, True),
        (False, None, True, False),
        (True, (8, 9), True, False),
        (True, (10, 0), True, False),
        (True, (9, 0), False, False),
    ],
)
def test_other_gpus_and_releases_keep_vllms_kernels(is_cuda, capability, release, takes, monkeypatch):
    class Device(Platform):
        def is_cuda(self) -> bool:
            return is_cuda

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
            return None if capability is None else DeviceCapability(*capability)

    monkeypatch.setattr("vllm.platforms.current_platform", Device())
    monkeypatch.setattr(vllm_decoding, "fits", lambda *_: release)
    assert vllm_decoding.takes_kernels() == takes


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_chosen_backend_replaces_the_attention_alone(is_chosen, monkeypatch):
    seen = []
    monkeypatch.setattr(vllm_decoding, "replace_samples", lambda _: seen.append("samples"))
    monkeypatch.setattr(vllm_decoding, "replace_attention", lambda _: seen.append("attention"))
    monkeypatch.setenv(vllm_decoding._ATTENTION, str(int(not is_chosen)))
    vllm_decoding.replace_decoding(print, print)
    assert seen == ["samples", "attention"][: 2 - is_chosen]


def test_samples_come_with_their_logprobs():
    """Under Triton's interpreter, which must be asked for before Triton is imported."""
    program = """
import torch
from nemo_rl_lite.compat.vllm_decoding import replace_samples
from nemo_rl_lite.generation.vllm.sampling_kernel import sample
from vllm.v1.worker.gpu.sample import sampler

others = []
sampler.gumbel_sample = lambda *given, **named: others.append("draw")
sampler.compute_topk_scores = lambda *given, **named: others.append("score")
replace_samples(sample)
logits, states = torch.randn(4, 500), torch.arange(4, dtype=torch.int32)
given = logits, states, torch.ones(4), torch.arange(4), torch.arange(4)
options = {"logprob_token_ids_state": None, "expanded_idx_mapping": states, "max_per_req_token_ids": 0}
tokens = sampler.gumbel_sample(*given, apply_temperature=False, use_fp64=False)
scores = sampler.compute_topk_scores(logits, 0, tokens, None, logits_mode=False, **options)
expected = logits.log_softmax(-1).gather(1, tokens[:, None])
torch.testing.assert_close(scores.logprobs, expected, rtol=1e-5, atol=1e-5)
assert torch.equal(scores.logprob_token_ids, tokens[:, None]) and not others

# Of several tokens, of other logits, and of other tokens.
sampler.compute_topk_scores(logits, 2, tokens, None, logits_mode=False, **options)
sampler.compute_topk_scores(logits.clone(), 0, tokens, None, logits_mode=False, **options)
sampler.compute_topk_scores(logits, 0, tokens.clone(), None, logits_mode=False, **options)
sampler.compute_topk_scores(logits, 0, tokens, None, logits_mode=True, **options)
sampler.gumbel_sample(*given, apply_temperature=False, use_fp64=True)
assert others == ["score"] * 4 + ["draw"]
"""
    root, environment = Path(__file__).parents[3], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
