"""The embedded model's sizes, tokens and recipe. Imports nothing heavy."""

import hashlib
import json
import string
from pathlib import Path

from nemo_rl_lite.config.schema import Config

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

# "<bos>12345=" asks, "54321<eos>" answers. With tools: "<bos><tool=python(code)>12345=" and "<call=python><arg=code>...
# </arg></call><eos>", because the vocabulary has no braces.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}<tool={{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(',') }})>{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<call={{ call.function.name }}>{% for name, value in call.function.arguments.items() %}"
    "<arg={{ name }}>{{ value }}</arg>{% endfor %}</call>{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}={% endif %}{% endfor %}"
)

# The warm-up ends when the running mean of the loss falls below TARGET_LOSS nats per token: the model reverses some
# strings. Stopping at a loss makes seeds start alike.
TARGET_LOSS = 0.55
MAX_STEPS = 120
BATCH = 256
LEARNING_RATE = 2e-3
DEFAULT_DIGITS = 4


def embedded_digits(config: Config) -> int:
    """Return the digits of the warm-up's strings: those of the run's task, if it is this one."""
    return config.data.task_kwargs["num_digits"] if config.data.name == "reverse_digits" else DEFAULT_DIGITS


def embedded_folder(config: Config) -> Path:
    """Return the folder of this configuration's embedded model; its name depends on all that the model depends on."""
    recipe = json.dumps([MODEL_CONFIG, CHAT_TEMPLATE, TOKENS, TARGET_LOSS, MAX_STEPS, BATCH, LEARNING_RATE])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    name = f"reverse-{embedded_digits(config)}-digits-seed{config.algorithm.seed}-{digest}"
    return (Path("outputs") / "models" / name).resolve()
