"""Locate, check and write Hugging Face model folders. Imports nothing heavy."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.models import embedded
from nemo_rl_lite.models.shape import CAUSAL, NoModelError, is_hub_name

if TYPE_CHECKING:
    from nemo_rl_lite.observability.console import RunConsole

INDEX = "model.safetensors.index.json"
# Maximum size of a file of weights, as in huggingface_hub.
SHARD_BYTES = 5 * 10**9
# Read if they exist.
_OPTIONAL = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
_EMBEDDING, _LAYER = "model.embed_tokens.weight", re.compile(r"model\.layers\.(\d+)\.")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# Subfolder of a run for its model with a custom chat template.
TEMPLATED = "model"
TEMPLATE_FILE = "chat_template.jinja"
# The folder of transformers' named templates.
_MORE_TEMPLATES = "additional_chat_templates"
# Size of the header's length at the start of a safetensors file.
_LENGTH_BYTES = 8


def locate_model(config: Config, console: "RunConsole", untrained: Path | None = None) -> Path:
    """Return the folder of `policy.model_name`, created or downloaded if it is missing. With `untrained`, a missing
    embedded model is created below that folder, without its warm-up. Raises ConfigError: the download fails."""
    name = config.policy.model_name
    if name == embedded.NAME:
        digits, folder = embedded.embedded_digits(config), embedded.embedded_folder(config)
        if not folder.is_dir() and untrained is not None:
            return embedded.prepare(untrained / folder.name, digits, config.algorithm.seed, steps=0)
        if not folder.is_dir():
            console.say(f"warming up a tiny model with SFT on {digits}-digit strings, once; cached in {folder}")

            def show(step: int, loss: float) -> None:
                if step % 10 == 0:
                    console.say(f"  sft step {step:>3}  loss {loss:.3f}")

            embedded.prepare(folder, digits, config.algorithm.seed, show)
        return folder
    if not is_hub_name(name):
        return Path(name).expanduser().resolve()
    try:
        with console.busy(f"downloading {name}"):
            return from_hub(name)
    except NoModelError as error:
        raise ConfigError([Violation("policy.model_name", name, str(error), error.fix)]) from None


def from_hub(name: str) -> Path:
    """Return the folder of a Hub model, downloaded if it is missing. Raises NoModelError: the download fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        fix = "check the name and the network, or give a local folder such as ./models/NAME"
        raise NoModelError(f"cannot be fetched from the hub: {cause}", fix) from None


def check_model_folder(folder: Path) -> None:
    """Check a Hugging Face model's files. Raises NoModelError: one is damaged, missing, or contradicts config.json."""
    config = _json(folder / "config.json")
    for name in _OPTIONAL:
        if (folder / name).exists():
            _json(folder / name)
    architectures = config.get("architectures") or []
    if not any(str(one).endswith(CAUSAL) for one in architectures):
        causal = f"a causal language model (...{' or ...'.join(CAUSAL)})"
        raise NoModelError(f"{folder / 'config.json'}: architectures = {architectures} does not name {causal}")
    if (index := folder / INDEX).exists():
        files = _json(index).get("weight_map")
        if not isinstance(files, dict):
            raise NoModelError(f"{index}: has no weight_map")
        if missing := sorted({str(name) for name in files.values() if not (folder / str(name)).is_file()}):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise NoModelError(f"{index}: names {missing[0]}{more}, which the folder lacks")
    shapes = dict(one for file in sorted(folder.glob("*.safetensors")) for one in _shapes(file))
    for trouble in _contradictions(config, shapes):
        raise NoModelError(f"{folder / 'config.json'}: {trouble}")


def _contradictions(config: dict[str, Any], shapes: dict[str, list[int]]) -> Iterator[str]:
    """Yield sizes in config.json that differ from those of weights with the usual names."""
    embedding, expected = shapes.get(_EMBEDDING), [config.get("vocab_size"), config.get("hidden_size")]
    if embedding is not None and embedding != expected:
        yield f"vocab_size and hidden_size are {expected}, but {_EMBEDDING} in the weights has shape {embedding}"
    numbers = {int(found[1]) for name in shapes if (found := _LAYER.match(name))}
    layers = config.get("num_hidden_layers", 0)
    # The numbering includes layers for multi-token prediction.
    if numbers and not layers <= len(numbers) <= layers + (config.get("num_nextn_predict_layers") or 0):
        yield f"num_hidden_layers is {layers}, but the weights have {len(numbers)} layers"


def _shapes(file: Path) -> list[tuple[str, list[int]]]:
    """Return names and shapes of the tensors in a safetensors file. Raises NoModelError: the file is incomplete."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES + length or not length:
                raise NoModelError(f"{file}: is incomplete: its {size} bytes end within the header")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        expected = _LENGTH_BYTES + length + max((one["data_offsets"][1] for one in header.values()), default=0)
        shapes = [(name, one["shape"]) for name, one in header.items()]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise NoModelError(f"{file}: is not a safetensors file: {type(error).__name__}: {error}") from None
    if size != expected:
        raise NoModelError(f"{file}: has {size} bytes, but its header expects {expected}: the copy is incomplete")
    return shapes


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NoModelError(f"{file}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise NoModelError(f"{file}: is not a JSON object")
    return content


def with_template(model: Path, template: Path, target: Path) -> Path:
    """Create and return `target`: links to the files of `model`, and the chat template from the file `template`. It
    replaces an earlier one.

    Raises:
        NoModelError: `target` was not made by this function.
        OSError: a file cannot be read or written.
    """
    made_here = target.is_dir() and all(one.is_symlink() or one.name == TEMPLATE_FILE for one in target.iterdir())
    if target.is_symlink() or (target.exists() and not made_here):
        raise NoModelError(f"{target} has other files, which the model with the custom chat template would replace")
    text = template.read_text()
    with replacing(target) as folder:
        for entry in model.iterdir():
            if entry.name not in (TEMPLATE_FILE, _MORE_TEMPLATES):
                (folder / entry.name).symlink_to(entry.resolve())
        (folder / TEMPLATE_FILE).write_text(text)
    return target


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `target` when the block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as unfinished:
        folder = Path(unfinished) / target.name
        folder.mkdir()
        yield folder
        for file in folder.glob("*.safetensors"):
            # safetensors writes files that other users cannot read. Links point outside this folder.
            if not file.is_symlink():
                file.chmod(folder.stat().st_mode & 0o666)
        if target.exists():
            target.rename(Path(unfinished) / "replaced")
        folder.rename(target)


def complete_hf_folder(folder: Path, source: Path, dtype: str) -> None:
    """Add the configuration and tokenizer files of `source` to a folder of weights.

    config.json gets the weights' `dtype` and loses its quantization. generation_config.json gets the chat template's
    end tokens. File modes follow the umask.
    """
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, folder / file.name)
    _name_end_tokens(folder)
    _name_dtype(folder, dtype)


def adapter_folder(model: Path) -> Path:
    """Return the folder for the adapters that are merged into the export `model`: `adapter` next to `hf`."""
    name = re.sub(r"^hf(?=-|$)", "adapter", model.name)
    return model.with_name(name if name != model.name else f"{model.name}-adapter")


def exported(config: Config, model: Path) -> list[Path]:
    """Return the folders of an export: `model`, and with LoRA the adapters' folder."""
    return [model, adapter_folder(model)] if config.policy.megatron_cfg.peft.enabled else [model]


def base_name(name: str, folder: Path) -> str:
    """Return the path or Hub model ID of the starting model. `name`: `policy.model_name`, located in `folder`."""
    if is_hub_name(name):
        return name
    return str(folder if name == embedded.NAME else Path(name).expanduser().resolve())


def _name_dtype(folder: Path, dtype: str) -> None:
    """Write the weights' precision to config.json; transformers and vLLM load in that precision."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for section in (config, config.get("text_config") or {}):
        # `torch_dtype` is the name before transformers 5.
        section |= dict.fromkeys({"dtype", "torch_dtype"} & section.keys(), dtype)
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = dtype
    config.pop("quantization_config", None)
    file.write_text(json.dumps(config, indent=2) + "\n")


def _name_end_tokens(folder: Path) -> None:
    """Add the chat template's end tokens to generation_config.json, so that transformers and vLLM stop there."""
    from nemo_rl_lite.data.chat_template import ChatTemplate
    from nemo_rl_lite.data.tokenizer import load_tokenizer

    file = folder / "generation_config.json"
    known = json.loads((file if file.exists() else folder / "config.json").read_text())
    named = known.get("eos_token_id")
    own = {named} if isinstance(named, int) else set(named or ())
    ends = own.union(ChatTemplate(load_tokenizer(folder), {}).end_tokens)
    if ends == own:
        return
    if not file.exists():
        # If this file exists, transformers ignores these keys in config.json.
        known = {name: known[name] for name in ("bos_token_id", "pad_token_id") if name in known}
    file.write_text(json.dumps(known | {"eos_token_id": sorted(ends)}, indent=2) + "\n")
