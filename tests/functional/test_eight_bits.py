"""What rounding to FP8 alone does to logprobs, by formula in float32: the limit of a probe allows it, and does not
allow other weights. The model is of the kind that GPU tests train."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from nemo_rl_lite.config.engines import VLLM_QUANTIZATIONS
from nemo_rl_lite.refit.interface import PROBE_TOLERANCE, PROBE_TOLERANCE_QUANTIZED

pytestmark = [pytest.mark.functional, pytest.mark.slow]

PROMPTS, PROMPT, TOKENS, BLOCK, LARGEST = 64, 12, 16, 128, 448.0


def rounded(values: Tensor, *shared: int) -> Tensor:
    """The values as FP8 numbers, which share a scale along these dimensions."""
    scale = values.abs().amax(shared, keepdim=True).clamp_min(1e-12) / LARGEST
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def rounded_to_powers(values: Tensor, *shared: int) -> Tensor:
    """The same with scales that are powers of two."""
    scale = (values.abs().amax(shared, keepdim=True).clamp_min(1e-12) / LARGEST).log2().ceil().exp2()
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def rounded_weight(weight: Tensor, way: str) -> Tensor:
    if way == "fp8_per_block":
        blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        return rounded(blocks, 1, 3).flatten(2).flatten(0, 1)
    return rounded(weight, 0, 1) if way == "fp8_per_tensor" else rounded(weight, 1)


def rounded_input(value: Tensor, way: str) -> Tensor:
    """A token has a scale of its own; with blocks, each 128 of its values."""
    return rounded(value.unflatten(-1, (-1, BLOCK)), -1).flatten(-2) if way == "fp8_per_block" else rounded(value, -1)


def random_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    sizes = {"vocab_size": 128, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    return Qwen3ForCausalLM(Qwen3Config(**heads, **sizes, tie_word_embeddings=True, initializer_range=0.08)).eval()


def in_eight_bits(model: Qwen3ForCausalLM, way: str) -> Qwen3ForCausalLM:
    model = copy.deepcopy(model)
    for layer in quantised(model):
        layer.weight.data = rounded_weight(layer.weight.data, way)
        layer.register_forward_pre_hook(lambda _, given: (rounded_input(given[0], way),))
    return model


def quantised(model: Qwen3ForCausalLM) -> list[nn.Linear]:
    named = model.named_modules()
    return [layer for name, layer in named if isinstance(layer, nn.Linear) and name != "lm_head"]


@torch.no_grad()
def differences(engine: Qwen3ForCausalLM, policy: Qwen3ForCausalLM) -> Tensor:
    """Of the tokens that the engine samples, [prompts, tokens], in nats."""
    prompts = torch.randint(4, 20, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    whole = engine.generate(prompts, max_new_tokens=TOKENS, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
    one, other = (
        model(whole).logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, whole[:, PROMPT:, None])[..., 0]
        for model in (engine, policy)
    )
    return (one - other).abs()


@pytest.mark.parametrize("way", VLLM_QUANTIZATIONS)
def test_rounding_passes_where_the_limit_of_bfloat16_would_end_a_run(way):
    policy = random_model(0)
    found = differences(in_eight_bits(policy, way), policy)
    of_a_probe = found.mean(1).max().item()
    assert PROBE_TOLERANCE["bfloat16"] < of_a_probe < PROBE_TOLERANCE_QUANTIZED
    # The GPU test of whole runs allows 1.45 of token_mult_prob_error.
    assert 1.25 < found.exp().mean().item() < 1.4


def test_a_second_rounding_costs_more_than_scales_that_are_powers_of_two(monkeypatch):
    """What compat/vllm.py avoids: weights that were rounded with scales of any value before."""
    policy, blocks = random_model(0), "fp8_per_block"
    before = copy.deepcopy(policy)
    for layer in quantised(before):
        layer.weight.data = rounded_weight(layer.weight.data, blocks)
    monkeypatch.setattr(f"{__name__}.rounded", rounded_to_powers)
    once, twice = (differences(in_eight_bits(model, blocks), policy).exp().mean() for model in (policy, before))
    assert once < 1.4 < twice


def test_other_weights_do_not_pass():
    found = differences(random_model(1), random_model(0))
    assert found.mean(1).min().item() > PROBE_TOLERANCE_QUANTIZED
