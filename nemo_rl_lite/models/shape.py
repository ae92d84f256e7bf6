"""Read a model's sizes from its Hugging Face config.json. Imports nothing heavy."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.schema import LoraTarget
from nemo_rl_lite.config.sizes import linear_layers
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.models import embedded


@dataclass(frozen=True)
class LatentShape:
    """Sizes of multi-head latent attention, which computes keys, values and mostly queries from compressed ones."""

    keys: int
    """Width of compressed keys and values of a token."""
    queries: int
    """Width of compressed queries; 0 if queries are computed from hidden states."""
    rotary: int
    """Part of `head_dim` with rotary embeddings. All heads share these keys."""
    values: int
    """Width of a head's values."""

    @property
    def cached(self) -> int:
        """Elements per token and layer of a cache of compressed keys and values."""
        return self.keys + self.rotary


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model."""

    layers: int
    hidden: int
    ffn: int
    """Width of a dense layer's MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a head's queries and keys."""
    vocabulary: int
    max_positions: int
    experts: int
    """0 in a dense model."""
    experts_per_token: int
    expert_ffn: int
    """Width of one expert's MLP."""
    expert_biases: bool
    """The routers may have load-balancing biases."""
    shared_ffn: int
    """Width of the shared expert, or of several together; 0 without one."""
    shared_gate: bool
    """A gate multiplies the shared expert's output."""
    dense_layers: int
    """Layers without experts."""
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    latent: LatentShape | None = None

    @property
    def linear_layers(self) -> list[LoraTarget]:
        """Megatron's names of the layers that can have adapters."""
        return linear_layers(self.latent is not None, self.latent is not None and self.latent.queries > 0)

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.latent.values if self.latent else self.head_dim


# Keys of config.json; an optional one may be 0 or null.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts")

# Families that balance experts only with an auxiliary loss.
_WITHOUT_EXPERT_BIASES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
# Keys of config.json in quantized models.
_QUANTIZED = ("quantization_config", "compression_config")
# Architectures whose FP8 blocks of this size megatron-bridge dequantizes.
_DEQUANTIZED, _BLOCK = ["DeepseekV3ForCausalLM"], [128, 128]
# Endings of trainable architectures.
CAUSAL = ("ForCausalLM", "LMHeadModel")
# The folder that scripts/get_smollm2.py writes to.
MODELS_FOLDER = "models"


class NoModelError(LauncherError):
    """Missing folder, or one without a trainable Hugging Face model. `fix`: a remedy, if known."""

    def __init__(self, message: str, fix: str = ""):
        self.fix = fix
        super().__init__(message)


def is_hub_name(name: str) -> bool:
    """Return whether `name` is a Hub model ID (`organisation/model`). `models/NAME` is a folder even if missing."""
    parts = name.split("/")
    well_formed = len(parts) == 2 and all(re.fullmatch(r"[\w.-]+", part) for part in parts)
    is_folder = name.startswith((".", "~", "/")) or parts[0] == MODELS_FOLDER
    return well_formed and not is_folder and not Path(name).exists()


def push_problems(name: str) -> Iterator[tuple[str, str]]:
    """Yield problems that prevent a push to the Hub repository `name` from this machine, each with its fix."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import get_token, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        yield "is not a Hub repository name", "name it organisation/name"
    if get_token() is None:
        fix = "run `hf auth login`, set HF_TOKEN, or omit the key: `hf upload` pushes the folder later"
        yield "this machine has no Hub token", fix


def read_model_shape(name: str) -> ModelShape | None:
    """Return the sizes of the model `name`; None for a Hub model ID. Raises NoModelError: it is not a whole model."""
    if name == embedded.NAME:
        return model_shape(embedded.MODEL_CONFIG)
    if name.startswith("embedded:"):
        raise NoModelError(f"there is no such embedded model; use {embedded.NAME}")
    try:
        if is_hub_name(name):
            return None
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise NoModelError("no such folder")
        if not (folder / "config.json").is_file():
            raise NoModelError("the folder has no config.json, so it is not a Hugging Face model")
        if not (folder / "tokenizer_config.json").is_file():
            raise NoModelError("the folder has no tokenizer_config.json")
        if not any(folder.glob("*.safetensors")):
            raise NoModelError("the folder has no *.safetensors weights")
        return model_shape(json.loads((folder / "config.json").read_text()))
    except (ValueError, TypeError) as error:
        raise NoModelError(f"config.json is unusable: {error}") from None
    except (OSError, RuntimeError) as error:
        raise NoModelError(str(error)) from None


def known_shape(name: str | Path | None) -> ModelShape | None:
    """Return the sizes of a model; None for a Hub model ID, and if `read_model_shape` refuses it."""
    try:
        return None if name is None else read_model_shape(str(name))
    except NoModelError:
        return None


def published_shape(name: str) -> ModelShape | None:
    """Return the sizes of a model, also of a known one of the Hub; None as `known_shape`."""
    return known_shape(name) or (model_shape(KNOWN_MODELS[name]) if name in KNOWN_MODELS else None)


def model_shape(config: dict) -> ModelShape:
    """Read the sizes from the content of a config.json.

    Raises:
        ValueError: a size is missing, or is not a whole number above 0.
        NoModelError: the model is not trainable.
    """
    keys = config if isinstance(config, dict) else {}
    _check_trainable(keys)
    if missing := [key for key in _SIZES if key not in keys]:
        raise ValueError(f"it is not that of a text model: {', '.join(missing)} missing")
    sizes = {key: config[key] for key in _SIZES} | {key: config.get(key) or 1 for key in _OPTIONAL_SIZES}
    for key, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value!r}, which is not a whole number above 0")
    heads, layers, family = config["num_attention_heads"], config["num_hidden_layers"], config.get("model_type", "")
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    # GPT-2 omits the MLP width.
    ffn = config.get("intermediate_size") or 4 * config["hidden_size"]
    head_dim, latent = config.get("head_dim") or config["hidden_size"] // heads, _latent(config)
    if latent is not None:
        head_dim = config["qk_nope_head_dim"] + latent.rotary
    expert_ffn = config.get("moe_intermediate_size") or ffn
    return ModelShape(
        layers=layers,
        hidden=config["hidden_size"],
        ffn=ffn,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocabulary=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok") or 0,
        expert_ffn=expert_ffn,
        expert_biases=bool(experts) and family not in _WITHOUT_EXPERT_BIASES,
        shared_ffn=config.get("shared_expert_intermediate_size") or expert_ffn * (config.get("n_shared_experts") or 0),
        shared_gate="shared_expert_intermediate_size" in config,
        dense_layers=_dense_layers(config, layers) if experts else layers,
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        # Qwen2 hard-codes its bias.
        qkv_bias=bool(config.get("attention_bias", family.startswith("qwen2"))),
        qk_norm=family.startswith("qwen3"),
        latent=latent,
    )


def _latent(config: dict) -> LatentShape | None:
    """Read the sizes of latent attention, with the keys of DeepSeek. Raises ValueError: one is missing."""
    if not config.get("kv_lora_rank"):
        return None
    if missing := [key for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim") if not config.get(key)]:
        raise ValueError(f"latent attention needs {', '.join(missing)}")
    return LatentShape(
        config["kv_lora_rank"], config.get("q_lora_rank") or 0, config["qk_rope_head_dim"], config["v_head_dim"]
    )


def _check_trainable(config: dict) -> None:
    architectures = config.get("architectures")
    for key in _QUANTIZED:
        settings = config.get(key)
        if not settings or _is_dequantized(architectures, settings):
            continue
        method = settings.get("quant_method", "unnamed") if isinstance(settings, dict) else settings
        rule = f"the model is quantized (config.json: {key}, {method}); its weights would be read as plain numbers"
        raise NoModelError(rule, "the unquantized model (bfloat16, float16 or float32)")
    # `KNOWN_MODELS` have no architecture.
    if architectures and not any(str(one).endswith(CAUSAL) for one in architectures):
        rule = f"config.json: architectures = {architectures} names no causal language model"
        raise NoModelError(rule, f"a model with an architecture ...{' or ...'.join(CAUSAL)}")


def _is_dequantized(architectures: Any, settings: Any) -> bool:
    """Return whether megatron-bridge dequantizes the weights of these architectures."""
    in_fp8 = isinstance(settings, dict) and settings.get("quant_method") == "fp8"
    return in_fp8 and settings.get("weight_block_size") == _BLOCK and architectures == _DEQUANTIZED


def _dense_layers(config: dict, layers: int) -> int:
    """Count layers without experts, from the keys of Qwen and DeepSeek."""
    listed, period = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    first = config.get("first_k_dense_replace") or 0
    return sum(layer in listed or layer < first or (layer + 1) % period != 0 for layer in range(layers))


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
# The folder that scripts/get_smollm2.py writes -> the published model of the same architecture.
MADE_HERE = {"models/smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def find_shape(name: str, file: Path | None = None) -> ModelShape:
    """Return a model's sizes from the config.json `file`, its folder, the table above, or the Hub.

    Raises NoModelError: none of them has usable sizes.
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
        why = "the Hub cannot be reached or has no config.json for it; pass a config.json with --model-config"
        raise NoModelError(f"policy.model_name={name}: {why}") from None
    try:
        return model_shape(json.loads(downloaded))
    except (ValueError, TypeError) as error:
        raise NoModelError(f"{name}: its config.json does not describe a text model: {error}") from None
    except NoModelError as error:
        raise NoModelError(f"policy.model_name={name}: {error}; name {error.fix}") from None
