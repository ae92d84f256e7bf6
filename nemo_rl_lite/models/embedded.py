"""Make the embedded model: a tiny Qwen3 and its tokenizer, warmed up by a short SFT on reversing digits."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from nemo_rl_lite.data.tasks import ReverseDigits
from nemo_rl_lite.models.embedded_task import (
    BATCH,
    BOS,
    CHAT_TEMPLATE,
    EOS,
    LEARNING_RATE,
    MAX_STEPS,
    MODEL_CONFIG,
    PAD,
    TARGET_LOSS,
    TOKENS,
    UNK,
)

Progress = Callable[[int, float], None]


def prepare(
    folder: Path,
    num_digits: int,
    seed: int,
    progress: Progress = lambda step, loss: None,
    steps: int = MAX_STEPS,
) -> Path:
    """Write the model, after at most `steps` of warm-up, to `folder` in Hugging Face format, and return it.

    An existing folder is kept; a new one appears whole or not at all. `progress` gets the step and the running loss.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as unfinished:
        transformers_logging.disable_progress_bar()
        tokenizer = build_tokenizer()
        model = build_model(seed)
        warm_up(model, tokenizer, ReverseDigits(num_digits, seed), progress, steps)
        target = Path(unfinished) / folder.name
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        try:
            target.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another run has just made the same model
                raise
    return folder


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Build the untrained model, float32."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config.from_dict(MODEL_CONFIG))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, and a chat template."""
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
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: ReverseDigits,
    progress: Progress,
    steps: int = MAX_STEPS,
) -> float:
    """Train on the answers of the task's training problems, and return the last running loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    running = float("inf")
    for step in range(steps):
        tokens, prompt_length = _batch(tokenizer, task, step * BATCH)
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


def _batch(tokenizer: PreTrainedTokenizerFast, task: ReverseDigits, position: int) -> tuple[torch.Tensor, int]:
    problems = [task.problem(position + row) for row in range(BATCH)]
    prompts = [f"{BOS}{problem.messages[0]['content']}=" for problem in problems]
    texts = [f"{prompt}{problem.answer}{EOS}" for prompt, problem in zip(prompts, problems, strict=True)]
    return torch.tensor(tokenizer(texts)["input_ids"]), len(tokenizer(prompts[0])["input_ids"])
