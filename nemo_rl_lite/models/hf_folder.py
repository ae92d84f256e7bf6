"""Write a model in Hugging Face format."""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def on_host(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies in host memory, one after the other: none is a view of another or of the model's."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}


def write_hf_folder(
    weights: dict[str, Tensor],
    source: Path,
    target: Path,
    check: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write `weights` (Hugging Face names, each in separate memory) to `target`, with the configuration and tokenizer
    files of `source`.

    The folder appears whole or not at all, and not if `check`, which sees it before, raises; one that exists is
    replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as unfinished:
        folder = Path(unfinished) / target.name
        folder.mkdir()
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_FILES):
                shutil.copy2(file, folder)
        save_torch_state_dict(weights, folder)
        check(folder)
        if target.exists():
            target.rename(Path(unfinished) / "replaced")
        folder.rename(target)
