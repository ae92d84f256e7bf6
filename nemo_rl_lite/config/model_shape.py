"""What rules need to know of a model, from its Hugging Face config.json alone. Imports nothing heavy."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_lite.embedded import reverse_digits
from nemo_rl_lite.errors import LauncherError


@dataclass(frozen=True)
class ModelShape:
    """Sizes from config.json. `max_positions` is in tokens."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    experts: int
    """0 in a dense model."""


class NoModelError(LauncherError):
    """The folder is not there, or is no Hugging Face model."""


def is_hub_name(name: str) -> bool:
    """Whether `name` is `organisation/model` and no folder of that name exists."""
    parts = name.split("/")
    well_formed = len(parts) == 2 and all(re.fullmatch(r"[\w.-]+", part) for part in parts)
    return well_formed and not name.startswith((".", "~", "/")) and not Path(name).exists()


def read_model_shape(name: str) -> ModelShape | None:
    """The shape of the model `name`, or None for a hub name (its config is not on this machine).

    Raises:
        NoModelError: saying what is missing.
    """
    if name == reverse_digits.NAME:
        return _shape(reverse_digits.MODEL_CONFIG)
    if name.startswith("embedded:"):
        raise NoModelError(f"there is no such embedded model; the one there is: {reverse_digits.NAME}")
    if is_hub_name(name):
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise NoModelError("no such folder")
    if not (folder / "config.json").is_file():
        raise NoModelError("the folder has no config.json, so it is no Hugging Face model")
    if not (folder / "tokenizer_config.json").is_file():
        raise NoModelError("the folder has no tokenizer_config.json")
    if not any(folder.glob("*.safetensors")):
        raise NoModelError("the folder has no *.safetensors weights")
    try:
        return _shape(json.loads((folder / "config.json").read_text()))
    except (json.JSONDecodeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise NoModelError(f"config.json is unusable: {type(error).__name__}: {error}") from None


def _shape(config: dict) -> ModelShape:
    heads = config["num_attention_heads"]
    return ModelShape(
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        experts=config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0,
    )
