"""Load the tokenizer of a model's folder."""

from pathlib import Path
from typing import Any

from nemo_rl_lite.errors import ConfigError, Violation


def load_tokenizer(folder: Path) -> Any:
    """Load a Hugging Face tokenizer. Raises ConfigError: the folder's files cannot be used."""
    from transformers import AutoTokenizer

    # Newer models of Mistral have a second tokenizer in their folder, in the format of mistral-common. transformers
    # takes that one, without a chat template, unless it is told to correct the split pattern of the first.
    mistral = (folder / "tekken.json").exists()
    if mistral and not (folder / "tokenizer.json").exists():
        fix = "take a copy of the model with tokenizer.json and a chat template"
        raise unusable(folder, "tekken.json is its only tokenizer, and has no chat template", fix)
    options = {"fix_mistral_regex": True} if mistral else {}
    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # a broken file raises errors of many libraries
        raise unusable(folder, f"the tokenizer cannot be read: {type(error).__name__}: {error}") from error


def unusable(folder: Path, rule: str, fix: str = "correct the file, or copy the model's folder again") -> ConfigError:
    """The error of a model whose tokenizer or chat template cannot be used."""
    return ConfigError([Violation("policy.model_name", str(folder), rule, fix)])
