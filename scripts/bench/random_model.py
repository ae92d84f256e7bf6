"""Write a model of a known shape with random weights: random_model.py SHAPE TOKENIZER_FOLDER TARGET

For measuring speed and memory where no weights can be had. The tokenizer may have fewer tokens than the model.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}


def main() -> None:
    shape, tokenizer_folder, target = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(Path(tokenizer_folder))
    config = Qwen3Config(
        **SHAPES[shape],
        vocab_size=151936,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.cpu().save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(f"{shape}: {sum(weight.numel() for weight in model.parameters()) / 1e9:.2f} B parameters in {target}")


if __name__ == "__main__":
    main()
