"""The embedded model: a tiny Qwen3 and its tokenizer, warmed up by a short SFT on reversing digits.

Heavy packages are imported where they are used.
"""

import hashlib
import json
import os
import string
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sources import source_configs
from nemo_rl_lite.system.machine import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    from nemo_rl_lite.data.tasks import ReverseDigits

Progress = Callable[[int, float], None]
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

# Prompt "<bos>12345=", response "54321<eos>". With tools: "<bos><tool=python(code)>12345=" and
# "<call=python><arg=code>...</arg></call><eos>", because the vocabulary has no braces.
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
_THREADS = 2


def embedded_digits(config: Config) -> int:
    """Return the number of digits in the warm-up's strings: that of the first source with the task reverse_digits."""
    data = [one.data for one in source_configs(config).values()]
    return next((one.task_kwargs["num_digits"] for one in data if one.name == "reverse_digits"), DEFAULT_DIGITS)


def embedded_folder(config: Config) -> Path:
    """Return the folder of this configuration's embedded model: in the user's cache, or below the working folder, which
    all nodes of a run see. Its name has a digest of everything that determines the model."""
    recipe = json.dumps([MODEL_CONFIG, CHAT_TEMPLATE, TOKENS, TARGET_LOSS, MAX_STEPS, BATCH, LEARNING_RATE])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    name = f"reverse-{embedded_digits(config)}-digits-seed{config.algorithm.seed}-{digest}"
    here = (Path("outputs") / "models" / name).resolve()
    if here.is_dir() or config.cluster.num_nodes > 1:
        return here
    return (cache_folder() / "models" / name).resolve()


def prepare(
    folder: Path, num_digits: int, seed: int, progress: Progress = lambda step, loss: None, steps: int = MAX_STEPS
) -> Path:
    """Write the model, after at most `steps` of warm-up, to `folder` in Hugging Face format, and return the folder.

    An existing folder is kept; a new one is written atomically. `progress` gets the step and the running loss.
    """
    if folder.is_dir():
        return folder
    _import_torch()
    from transformers.utils import logging

    from nemo_rl_lite.data.tasks import ReverseDigits

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as unfinished:
        logging.disable_progress_bar()
        tokenizer = build_tokenizer()
        model = build_model(seed)
        with _fixed_threads():
            warm_up(model, tokenizer, ReverseDigits(num_digits, seed), progress, steps)
        target = Path(unfinished) / folder.name
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        try:
            target.rename(folder)
        except OSError:
            # Another run may have created the same model meanwhile.
            if not folder.is_dir():
                raise
    return folder


def _import_torch() -> None:
    """Import torch with threads that sleep while they wait, unless it is imported already.

    Where other processes use the cores, threads that spin make the warm-up several times longer. OpenMP reads the
    variable when it is loaded. Processes that are started later keep their default.
    """
    chosen = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = chosen or "PASSIVE"
    import torch  # noqa: F401

    if chosen is None:
        del os.environ["OMP_WAIT_POLICY"]


@contextmanager
def _fixed_threads() -> Iterator[None]:
    """Use a fixed number of threads, because it affects rounding and all of a user's runs share the model."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def build_model(seed: int) -> "Qwen3ForCausalLM":
    """Build the untrained model, float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config.from_dict(MODEL_CONFIG))


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Build a tokenizer with one token per character, and a chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token=UNK))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, BOS, EOS, UNK)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def warm_up(
    model: "Qwen3ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    task: "ReverseDigits",
    progress: Progress,
    steps: int = MAX_STEPS,
) -> float:
    """Train on the answers of the task's training problems, and return the last running loss."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    running = float("inf")
    for step in range(steps):
        problems = [task.problem(step * BATCH + row) for row in range(BATCH)]
        prompts = [f"{BOS}{problem.messages[0]['content']}=" for problem in problems]
        texts = [f"{prompt}{problem.answer}{EOS}" for prompt, problem in zip(prompts, problems, strict=True)]
        tokens, prompt_length = torch.tensor(tokenizer(texts)["input_ids"]), len(tokenizer(prompts[0])["input_ids"])
        logits = model(tokens[:, :-1]).logits[:, prompt_length - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, prompt_length:].flatten())
        running = loss.item() if step == 0 else 0.7 * running + 0.3 * loss.item()
        progress(step, running)
        if running < TARGET_LOSS:
            break
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return running
