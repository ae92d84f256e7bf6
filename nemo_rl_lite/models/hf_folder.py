"""Write a model in Hugging Face format."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor

from nemo_rl_lite.data.chat_template import ChatTemplate
from nemo_rl_lite.data.tokenizer import load_tokenizer

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
    files of `source`. Its generation_config.json names all tokens that end a response, also where the chat template is
    not the model's own.

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
        _name_end_tokens(folder)
        save_torch_state_dict(weights, folder)
        check(folder)
        if target.exists():
            target.rename(Path(unfinished) / "replaced")
        folder.rename(target)


def _name_end_tokens(folder: Path) -> None:
    """Add the tokens that end the chat template's turns, at which a run ends responses, to those of the folder's
    generation_config.json: transformers and vLLM would run on after others."""
    file = folder / "generation_config.json"
    known = json.loads((file if file.exists() else folder / "config.json").read_text())
    named = known.get("eos_token_id")
    own = {named} if isinstance(named, int) else set(named or ())
    ends = own.union(ChatTemplate(load_tokenizer(folder), {}).end_tokens)
    if ends == own:
        return
    if not file.exists():
        # transformers reads these in config.json only where there is no such file.
        known = {name: known[name] for name in ("bos_token_id", "pad_token_id") if name in known}
    # The copy may be as read-only as the source.
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(known | {"eos_token_id": sorted(ends)}, indent=2) + "\n")
