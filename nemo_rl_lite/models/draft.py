"""Read the sizes of a draft for speculative decoding, and compare them with the policy's. Imports nothing heavy."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_lite.models import embedded
from nemo_rl_lite.models.shape import ModelShape, is_hub_name
from nemo_rl_lite.observability.runs import read_json

# Where the libraries that train drafts put the sizes of a draft's layers.
_NESTED = "transformer_layer_config"
# Keys of config.json with the number of layers for multi-token prediction.
_OWN_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft."""

    layers: int
    kv_heads: int
    head_dim: int
    weight_bytes: int


def draft_shape(name: str) -> DraftShape | None:
    """Return the sizes of the draft in the folder `name`; None if they are unknown."""
    config = _sizes(_config(name))
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    folder = Path(name).expanduser()
    files = list(folder.glob("*.safetensors")) or folder.glob("*.bin")
    return DraftShape(
        layers=config.get("num_hidden_layers") or 1,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        weight_bytes=sum(file.stat().st_size for file in files),
    )


def draft_troubles(name: str, policy: ModelShape | None, is_head: bool) -> Iterator[str]:
    """Yield why the draft `name` cannot draft for the policy. `is_head`: it reads the policy's hidden states."""
    folder = Path(name).expanduser()
    if is_hub_name(name):
        return
    if not folder.is_dir():
        yield "no such folder"
        return
    if not (folder / "config.json").is_file():
        yield "the folder has no config.json"
        return
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        yield "the folder has no weights"
    config = _config(name)
    sizes = _sizes(config)
    hidden = config.get("target_hidden_size") or sizes.get("target_hidden_size") or sizes.get("hidden_size")
    expected = [] if policy is None else [("vocab_size", sizes.get("vocab_size"), policy.vocabulary)]
    if policy is not None and is_head:
        expected.append(("hidden_size", hidden, policy.hidden))
    for key, own, other in expected:
        if own is not None and own != other:
            yield f"{key} is {own}, and that of the policy is {other}"


def own_draft_layers(name: str) -> int | None:
    """Return a model's number of layers for multi-token prediction; None if it is unknown."""
    if name == embedded.NAME:
        return 0
    config = _config(name)
    sections = (config, config.get("text_config") or {})
    return max((one.get(key) or 0 for one in sections for key in _OWN_LAYERS), default=0) if config else None


def _config(name: str) -> dict[str, Any]:
    """Return the content of config.json in the folder `name`; empty if there is none."""
    return read_json(Path(name).expanduser() / "config.json")


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get(_NESTED)
    return nested if isinstance(nested, dict) else config
