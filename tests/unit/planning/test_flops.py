"""FLOPs against what torch counts while transformers computes, and against sums by hand."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nemo_rl_lite.config.schema import LoraConfig
from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.models.flops import forward_flops
from nemo_rl_lite.models.shape import KNOWN_MODELS, ModelShape, model_shape
from nemo_rl_lite.planning.memory import DecodingBytes
from nemo_rl_lite.planning.parameters import SequenceFlops
from nemo_rl_lite.validation.compose import compose_config

LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
NONE = LoraConfig(enabled=False, dim=8, alpha=16, dropout=0.0, target_modules=LAYERS)
LORA = replace(NONE, enabled=True)
TOKENS = 24
# As the embedded model, with an MLP of experts: 6 in each layer, of which a token visits 2, and one for all.
EXPERTS = MODEL_CONFIG | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}


def transformers_model(config: dict) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in config.items() if key != "architectures"}
    described = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    return AutoModelForCausalLM.from_config(
        # torch does not count what grouped products take.
        described,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def counted(model: torch.nn.Module, backward: bool) -> float:
    """FLOPs of one sequence as torch counts them, which takes every pair of tokens for one that meets."""
    tokens = torch.arange(TOKENS)[None] % 30 + 4
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def of_later_tokens(shape: ModelShape) -> float:
    """FLOPs of a forward pass for pairs whose second token comes later than the first, which a causal model masks, but
    eager attention computes. There are T (T - 1) / 2 of them, for scores and sums of 2 FLOPs an element."""
    return shape.layers * 2 * 2 * shape.heads * shape.head_dim * TOKENS * (TOKENS - 1) / 2


def rotary(config: dict) -> float:
    """FLOPs of the angles of rotary embeddings, a product of positions and frequencies: no matrix of weights."""
    return 2 * TOKENS * config["head_dim"] / 2


def test_a_pass_takes_what_torch_counts_of_the_embedded_model():
    model, shape = transformers_model(MODEL_CONFIG), model_shape(MODEL_CONFIG)
    flops, own = SequenceFlops(shape, NONE), rotary(MODEL_CONFIG)
    assert counted(model, backward=False) == flops.forward(TOKENS) + of_later_tokens(shape) + own
    assert counted(model, backward=True) == flops.training(TOKENS) + 3 * of_later_tokens(shape) + own
    assert flops.reference(TOKENS) == flops.forward(TOKENS) == forward_flops(shape, TOKENS)


def test_only_the_experts_that_a_token_visits_are_counted():
    shape = model_shape(EXPERTS)
    assert shape.experts == 6 and shape.shared_ffn == 80 and shape.dense_layers == 0
    forward = counted(transformers_model(EXPERTS), backward=False)
    assert forward == forward_flops(shape, TOKENS) + of_later_tokens(shape) + rotary(EXPERTS)


def test_frozen_matrices_have_no_gradient_of_their_weights_and_adapters_have():
    """Adapters of rank 8, in each of the 4 layers: queries of 4 heads, keys and values of 2, of 32; a gated MLP."""
    model, shape = transformers_model(MODEL_CONFIG), model_shape(MODEL_CONFIG)
    flops = SequenceFlops(shape, LORA)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # What comes before the first trained weight has no backward pass, so the embeddings are trained here, by a lookup.
    model.model.embed_tokens.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    adapters = 2 * TOKENS * 4 * 8 * ((128 + 256) + (128 + 128) + (128 + 2 * 384) + (384 + 128))
    assert flops.forward(TOKENS) - flops.reference(TOKENS) == adapters
    measured = counted(model, backward=True) - 3 * of_later_tokens(shape) - rotary(MODEL_CONFIG)
    assert flops.training(TOKENS) == measured + 3 * adapters


def test_an_engine_reads_weights_once_a_step_and_every_cached_token():
    config = [
        "policy=megatron_gpu",
        "generation=vllm_gpu",
        "cluster.gpus_per_node=8",
        "policy.model_name=Qwen/Qwen3-8B",
    ]
    shape = model_shape(KNOWN_MODELS["Qwen/Qwen3-8B"])
    for ranks in (1, 4):
        more = f"generation.vllm_cfg.tensor_parallel_size={ranks}"
        nbytes = DecodingBytes.of(compose_config([*config, more]), shape)
        assert nbytes.step == pytest.approx(2 * 7.568e9 / ranks, rel=1e-3)
        assert nbytes.token == 2 * 36 * 8 / ranks * 128 * 2
