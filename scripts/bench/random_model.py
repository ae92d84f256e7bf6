"""Write a model of a known shape with random weights: random_model.py SHAPE[:LAYERS] TOKENIZER TARGET [POSITIONS]

Such a model is for measuring speed and memory without real weights. The tokenizer is a model's folder, and may have
fewer tokens than the model, which has 40960 positions unless the command gives another number.
"""

from pathlib import Path
from typing import Any

import record
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    # Without the scaling of Llama 3.1's rotary embeddings, which is for longer sequences.
    "llama3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500_000.0,
    },
    # For trials on a CPU: 15 M parameters.
    "llama-tiny": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "vocab_size": 49152,
    },
    # 1.5 B parameters, of which 0.5 B are active for a token.
    "qwen3-moe-1.5b": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    # Qwen3-30B-A3B: 0.62 B parameters a layer, of which 0.06 B are active for a token, and 0.62 B outside of layers.
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    # For trials on a CPU: 3 M parameters.
    "qwen3-moe-tiny": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 49152,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}

# As qwen3-moe-1.5b for a token, but each goes to all experts, so that there is no choice among them.
SHAPES["qwen3-moe-no-choice"] = SHAPES["qwen3-moe-1.5b"] | {"num_experts": 4}


def model_config(shape: str, **own: Any) -> PretrainedConfig:
    """Return the Hugging Face configuration of SHAPE or SHAPE:LAYERS with its `own` fields. Raises KeyError: no such
    shape."""
    name, _, layers = shape.partition(":")
    sizes = DEFAULTS | SHAPES[name] | ({"num_hidden_layers": int(layers)} if layers else {})
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
