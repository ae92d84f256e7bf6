"""Convert a llama model in a GGUF file (llama.cpp's format) to a Hugging Face folder. Needs the package `gguf`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nemo_rl_lite.errors import LauncherError

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# llama.cpp's names of pre-tokenizers -> whether each digit is a separate piece.
_DIGITS_APART = {"smollm": True, "gpt-2": False}
# GGUF gives control tokens such as <|im_end|> this token type.
_CONTROL = 3


class UnsupportedGGUFError(LauncherError):
    """The GGUF file is damaged, or not a llama model with a byte-level BPE tokenizer."""


def convert(file: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model in `file` to the existing `folder`: configuration, weights in `dtype`, tokenizer.

    Raises:
        UnsupportedGGUFError: the file cannot be read, or its contents are not supported.
    """
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError) as error:
        raise UnsupportedGGUFError(f"{file}: no readable GGUF file: {error}") from None
    fields = _Fields(reader, file)
    fields.expect("general.architecture", ["llama"])
    fields.expect("tokenizer.ggml.model", ["gpt2"])
    fields.expect("tokenizer.ggml.pre", list(_DIGITS_APART))
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = _config(fields, tied, dtype)
    weights = _weights(reader, config, dtype)
    _check_weights(weights, config, file)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**tokens).save_pretrained(folder)
    _tokenizer(fields).save_pretrained(folder)


class _Fields:
    """The file's metadata by key."""

    def __init__(self, reader: GGUFReader, file: Path):
        self._fields, self._file = reader.fields, file

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise UnsupportedGGUFError(f"{self._file}: has no '{key}'")
        return self._fields[key].contents()

    def optional(self, key: str) -> Any:
        return self[key] if key in self._fields else None

    def expect(self, key: str, known: list[str]) -> None:
        if self[key] not in known:
            listing = ", ".join(known)
            raise UnsupportedGGUFError(f"{self._file}: {key} is {self[key]!r}, and only {listing} is converted")


def _config(fields: _Fields, tied: bool, dtype: torch.dtype) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        # GGUF stores this as float32, so 1e-5 reads as 9.99999974e-06.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields.optional("tokenizer.ggml.padding_token_id"),
        dtype=dtype,
    )


def _weights(reader: GGUFReader, config: LlamaConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights by their Hugging Face names."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name, part = _WHOLE_MODEL.get(tensor.name), tensor.name.split(".")
        if name is None and len(part) == 4 and part[2] in _LAYER:
            name = f"model.layers.{part[1]}.{_LAYER[part[2]]}.{part[3]}"
            if part[2] in heads:
                values = _halves_from_pairs(values, heads[part[2]])
        weights[name or tensor.name] = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    return weights


def _halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of a query or key matrix [heads x head_dim, hidden].

    llama.cpp rotates neighbours (0, 1), (2, 3), ... of a head, Hugging Face's llama a head's first half against its
    second; rows 2i and 2i + 1 there are rows i and i + head_dim / 2 here.
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _check_weights(weights: dict[str, Tensor], config: LlamaConfig, file: Path) -> None:
    """Check the weights. Raises UnsupportedGGUFError: they are not exactly those of a llama of this configuration."""
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != wanted:
        different = sorted(name for name in found.keys() | wanted if found.get(name) != wanted.get(name))
        listing = ", ".join(f"{name} (has {found.get(name)}, needs {wanted.get(name)})" for name in different[:3])
        raise UnsupportedGGUFError(f"{file}: {len(different)} weights are not those of its llama: {listing}")


def _tokenizer(fields: _Fields) -> PreTrainedTokenizerFast:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if _DIGITS_APART[fields["tokenizer.ggml.pre"]]:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    else:
        tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: fields.optional(f"tokenizer.ggml.{field}_token_id") for name, field in named.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{name: tokens[index] for name, index in ids.items() if index is not None},
        chat_template=fields.optional("tokenizer.chat_template"),
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
