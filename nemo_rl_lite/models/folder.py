"""Whether the files of a model's folder are whole and fit together, by what they say of themselves. Imports nothing
heavy, and reads no weights."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rl_lite.models.shape import CAUSAL, NoModelError

_INDEX = "model.safetensors.index.json"
# These are read where they exist.
_OPTIONAL = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
_EMBEDDING, _LAYER = "model.embed_tokens.weight", re.compile(r"model\.layers\.(\d+)\.")
# A safetensors file begins with the length of its header, in so many bytes.
_LENGTH_BYTES = 8


def check_model_folder(folder: Path) -> None:
    """Check the folder of a Hugging Face model.

    Raises:
        NoModelError: a file is broken, missing, or contradicts config.json; the message names it.
    """
    config = _json(folder / "config.json")
    for name in _OPTIONAL:
        if (folder / name).exists():
            _json(folder / name)
    architectures = config.get("architectures") or []
    if not any(str(one).endswith(CAUSAL) for one in architectures):
        causal = f"a causal language model (...{' or ...'.join(CAUSAL)})"
        raise NoModelError(f"{folder / 'config.json'}: architectures = {architectures} does not name {causal}")
    if (folder / _INDEX).exists():
        _check_index(folder / _INDEX)
    shapes = dict(one for file in sorted(folder.glob("*.safetensors")) for one in _shapes(file))
    for trouble in _contradictions(config, shapes):
        raise NoModelError(f"{folder / 'config.json'}: {trouble}")


def _check_index(index: Path) -> None:
    """Raise NoModelError where a file that the index names is missing."""
    places = _json(index).get("weight_map")
    if not isinstance(places, dict):
        raise NoModelError(f"{index}: has no weight_map")
    if missing := sorted({str(name) for name in places.values() if not (index.parent / str(name)).is_file()}):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NoModelError(f"{index}: names {missing[0]}{more}, which the folder does not have")


def _contradictions(config: dict[str, Any], shapes: dict[str, list[int]]) -> Iterator[str]:
    """Yield where the sizes in config.json differ from the weights', whose names may be others than the usual ones."""
    embedding, expected = shapes.get(_EMBEDDING), [config.get("vocab_size"), config.get("hidden_size")]
    if embedding is not None and embedding != expected:
        yield f"vocab_size and hidden_size are {expected}, and the shape of {_EMBEDDING} in the weights is {embedding}"
    numbers = {int(found[1]) for name in shapes if (found := _LAYER.match(name))}
    layers = config.get("num_hidden_layers", 0)
    # Some models predict further tokens with layers that are numbered on.
    if numbers and not layers <= len(numbers) <= layers + (config.get("num_nextn_predict_layers") or 0):
        yield f"num_hidden_layers is {layers}, and the weights have {len(numbers)} layers"


def _shapes(file: Path) -> list[tuple[str, list[int]]]:
    """The names and shapes of the tensors in a safetensors file.

    Raises:
        NoModelError: the file is not whole.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES + length or not length:
                raise NoModelError(f"{file}: is incomplete: its {size} bytes do not hold a whole header")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        expected = _LENGTH_BYTES + length + max((one["data_offsets"][1] for one in header.values()), default=0)
        shapes = [(name, one["shape"]) for name, one in header.items()]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise NoModelError(f"{file}: is no safetensors file: {type(error).__name__}: {error}") from None
    if size != expected:
        raise NoModelError(f"{file}: is {size} bytes long, and its header says {expected}: it was not copied whole")
    return shapes


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NoModelError(f"{file}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise NoModelError(f"{file}: is not a JSON object")
    return content
