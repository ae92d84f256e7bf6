"""The shape of the embedded model: what rules and builders must know about it. Imports nothing heavy."""

import string

NAME = "embedded:reverse-digits"

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
TOKENS = (PAD, BOS, EOS, UNK, *string.digits, *string.ascii_lowercase, *" =+-*/().,:;?!'\"<>[]_#%&")

# A Hugging Face Qwen3 configuration of 0.8 M parameters. vLLM's CPU attention needs a head_dim of at least 32.
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(TOKENS),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "pad_token_id": TOKENS.index(PAD),
    "bos_token_id": TOKENS.index(BOS),
    "eos_token_id": TOKENS.index(EOS),
}

# "<bos>12345=" asks, "54321<eos>" answers.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}={% endif %}{% endfor %}"
)
