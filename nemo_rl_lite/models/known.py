"""The sizes of published models from their config.json, so that a plan needs no network."""

import json
from pathlib import Path
from typing import Any

from nemo_rl_lite.models.shape import ModelShape, NoModelError, model_shape, read_model_shape


def _sizes(family: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    common = {"vocab_size": 151936, "max_position_embeddings": 40960}
    own = {"model_type": family, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    return common | own | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | more


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_LONG: dict[str, Any] = {"max_position_embeddings": 32768}
_WIDE: dict[str, Any] = {"head_dim": 128}
_LLAMA: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 131072}
_SMOL: dict[str, Any] = {"vocab_size": 49152, "max_position_embeddings": 8192}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8} | _WIDE
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _sizes("qwen2", 896, 4864, 24, 14, 2, **_TIED, **_LONG),
    "Qwen/Qwen2.5-1.5B-Instruct": _sizes("qwen2", 1536, 8960, 28, 12, 2, **_TIED, **_LONG),
    "Qwen/Qwen2.5-7B-Instruct": _sizes("qwen2", 3584, 18944, 28, 28, 4, vocab_size=152064, **_LONG),
    "Qwen/Qwen3-0.6B": _sizes("qwen3", 1024, 3072, 28, 16, 8, **_TIED, **_WIDE),
    "Qwen/Qwen3-1.7B": _sizes("qwen3", 2048, 6144, 28, 16, 8, **_TIED, **_WIDE),
    "Qwen/Qwen3-4B": _sizes("qwen3", 2560, 9728, 36, 32, 8, **_TIED, **_WIDE),
    "Qwen/Qwen3-8B": _sizes("qwen3", 4096, 12288, 36, 32, 8, **_WIDE),
    "Qwen/Qwen3-14B": _sizes("qwen3", 5120, 17408, 40, 40, 8, **_WIDE),
    "Qwen/Qwen3-32B": _sizes("qwen3", 5120, 25600, 64, 64, 8, **_WIDE),
    "Qwen/Qwen3-30B-A3B": _sizes("qwen3_moe", 2048, 6144, 48, 32, 4, moe_intermediate_size=768, **_EXPERTS),
    "Qwen/Qwen3-235B-A22B": _sizes("qwen3_moe", 4096, 12288, 94, 64, 4, moe_intermediate_size=1536, **_EXPERTS),
    "meta-llama/Llama-3.2-1B-Instruct": _sizes("llama", 2048, 8192, 16, 32, 8, head_dim=64, **_TIED, **_LLAMA),
    "meta-llama/Llama-3.1-8B-Instruct": _sizes("llama", 4096, 14336, 32, 32, 8, **_LLAMA),
    "meta-llama/Llama-3.1-70B-Instruct": _sizes("llama", 8192, 28672, 80, 64, 8, **_LLAMA),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _sizes("llama", 576, 1536, 30, 9, 3, **_TIED, **_SMOL),
}
# The folder that scripts/get_smollm2.py makes -> the published model with the same sizes.
MADE_HERE = {"models/smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def find_shape(name: str, file: Path | None = None) -> ModelShape:
    """Find the shape of a model: from the config.json `file`, its folder, the table above, or the hub.

    Raises:
        NoModelError: none of these has it.
    """
    if file is not None:
        try:
            return model_shape(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise NoModelError(f"--model-config {file} cannot be used: {error}") from None
        except NoModelError as error:
            raise NoModelError(f"--model-config {file}: {error}; give that of {error.fix}") from None
    shape = read_model_shape(name)
    if shape is not None:
        return shape
    if name in KNOWN_MODELS:
        return model_shape(KNOWN_MODELS[name])
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        downloaded = Path(hf_hub_download(name, "config.json")).read_text()
    except (OSError, ValueError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        fix = "give its config.json with --model-config"
        raise NoModelError(
            f"policy.model_name={name}: the hub cannot be reached or has no config.json for it; {fix}"
        ) from None
    try:
        return model_shape(json.loads(downloaded))
    except (ValueError, TypeError) as error:
        raise NoModelError(f"{name}: its config.json does not describe a text model: {error}") from None
    except NoModelError as error:
        raise NoModelError(f"policy.model_name={name}: {error}; name {error.fix}") from None
