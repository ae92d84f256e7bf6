"""Write a model of a known shape with random weights: random_model.py SHAPE[:LAYERS] TOKENIZER TARGET [POSITIONS]

Such a model is for measuring speed and memory without real weights. The tokenizer is a model's folder, and may have
fewer tokens than the model, which has 40960 positions unless the command gives another number.
"""

from pathlib import Path
from typing import Any

import record
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
UNTIED, TOP_K = {"tie_word_embeddings": False}, {"norm_topk_prob": True}


def deepseek(keys: int, queries: int, plain: int, rotated: int) -> dict[str, Any]:
    """Return fields of DeepSeek-V3: ranks of keys and queries, a head's widths, and the router's method."""
    widths = {"qk_nope_head_dim": plain, "qk_rope_head_dim": rotated, "head_dim": rotated, "v_head_dim": plain}
    router = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    return {"kv_lora_rank": keys, "q_lora_rank": queries, "tie_word_embeddings": False} | widths | router


# The values of `FIELDS`, and other fields.
SHAPES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "qwen2.5-0.5b": (("qwen2", 896, 4864, 24, 14, 2), {"head_dim": 64}),
    "qwen2.5-1.5b": (("qwen2", 1536, 8960, 28, 12, 2), {}),
    "qwen3-0.6b": (("qwen3", 1024, 3072, 28, 16, 8), {}),
    "qwen3-1.7b": (("qwen3", 2048, 6144, 28, 16, 8), {}),
    "qwen3-4b": (("qwen3", 2560, 9728, 36, 32, 8), {}),
    "qwen3-8b": (("qwen3", 4096, 12288, 36, 32, 8), UNTIED),
    "qwen3-32b": (("qwen3", 5120, 25600, 64, 64, 8), UNTIED),
    # Without the scaling of Llama 3.1's rotary embeddings, which is for longer sequences.
    "llama3.1-8b": (
        ("llama", 4096, 14336, 32, 32, 8),
        UNTIED | {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500_000.0},
    ),
    # 0.86 B parameters a layer, and 2.1 B outside of layers.
    "llama3.1-70b": (
        ("llama", 8192, 28672, 80, 64, 8),
        UNTIED | {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500_000.0},
    ),
    # For checkpoints on a CPU: 113 M parameters.
    "llama-0.1b": (("llama", 768, 2048, 6, 12, 4), UNTIED | {"head_dim": 64, "vocab_size": 49152}),
    # For trials on a CPU: 15 M parameters, and 3 M.
    "llama-tiny": (("llama", 128, 512, 4, 4, 2), UNTIED | {"head_dim": 32, "vocab_size": 49152}),
    "qwen3-moe-tiny": (
        ("qwen3_moe", 64, 128, 2, 4, 2),
        TOP_K
        | {"head_dim": 32, "vocab_size": 49152}
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    # 1.5 B parameters, of which 0.5 B are active for a token.
    "qwen3-moe-1.5b": (
        ("qwen3_moe", 1024, 3072, 16, 16, 4),
        TOP_K | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768},
    ),
    # Qwen3-30B-A3B: 0.62 B parameters a layer, of which 0.06 B are active for a token, and 0.62 B outside of layers.
    "qwen3-30b-a3b": (
        ("qwen3_moe", 2048, 6144, 48, 32, 4),
        UNTIED | TOP_K | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    # 2.5 B parameters a layer, of which 0.22 B are active for a token, and 1.2 B outside of layers.
    "qwen3-235b-a22b": (
        ("qwen3_moe", 4096, 12288, 94, 64, 4),
        UNTIED | TOP_K | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    ),
    # 0.6 B parameters in a dense layer, 11.5 B in one with experts, and 1.9 B outside of layers.
    "deepseek-v3": (
        ("deepseek_v3", 7168, 18432, 61, 128, 128),
        deepseek(512, 1536, 128, 64)
        | {"vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    ),
    # For trials: a dense layer, and one with 8 experts in 2 groups and a shared one. 6.5 M parameters.
    "deepseek-v3-tiny": (
        ("deepseek_v3", 64, 128, 2, 4, 4),
        deepseek(32, 48, 16, 16)
        | {"vocab_size": 49152, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
}


def model_config(shape: str, **own: Any) -> PretrainedConfig:
    """Return the Hugging Face configuration of SHAPE or SHAPE:LAYERS with its `own` fields. Raises KeyError: no such
    shape."""
    name, _, layers = shape.partition(":")
    values, others = SHAPES[name]
    sizes = DEFAULTS | dict(zip(FIELDS, values, strict=True)) | others
    sizes |= {"num_hidden_layers": int(layers)} if layers else {}
    return AutoConfig.for_model(**sizes | own)


def main(arguments: list[str]) -> None:
    shape, tokenizer_folder, target, *positions = arguments
    tokenizer = AutoTokenizer.from_pretrained(Path(tokenizer_folder))
    config = model_config(
        shape,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"max_position_embeddings": int(positions[0])} if positions else {}),
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.cpu().save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(f"{shape}: {sum(weight.numel() for weight in model.parameters()) / 1e9:.2f} B parameters in {target}")


def trial() -> None:
    from whole_runs import tiny_model

    main(["qwen3-moe-tiny", str(tiny_model()), str(tiny_model().with_name("experts")), "512"])


if __name__ == "__main__":
    record.start(main, trial)
