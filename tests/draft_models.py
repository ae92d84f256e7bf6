"""Random draft models for speculative decoding."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Tokens that the head can draft: the first of the policy's vocabulary.
DRAFTED = 32


def eagle3_head(folder: Path, policy: dict[str, Any], layers: Sequence[int]) -> Path:
    """Write a random EAGLE-3 head without an embedding for the policy with this config.json. `layers`: numbers of the
    policy's layers whose inputs it reads."""
    import torch
    from safetensors.torch import save_file

    hidden, heads, kv_heads = policy["hidden_size"], policy["num_attention_heads"], policy["num_key_value_heads"]
    head_dim, ffn = policy.get("head_dim") or hidden // heads, policy["intermediate_size"]
    shapes = {
        "fc": (hidden, len(layers) * hidden),
        "midlayer.self_attn.q_proj": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj": (ffn, hidden),
        "midlayer.mlp.up_proj": (ffn, hidden),
        "midlayer.mlp.down_proj": (hidden, ffn),
        "lm_head": (DRAFTED, hidden),
    }
    generator = torch.Generator().manual_seed(1)
    weights = {f"{name}.weight": 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights |= {"d2t": torch.zeros(DRAFTED, dtype=torch.long), "t2d": torch.arange(policy["vocab_size"]) < DRAFTED}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "head_dim": head_dim,
        "draft_vocab_size": DRAFTED,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "rms_norm_eps": 1e-6,
    }
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    sizes += ("max_position_embeddings",)
    (folder / "config.json").write_text(json.dumps({name: policy[name] for name in sizes} | own))
    return folder
