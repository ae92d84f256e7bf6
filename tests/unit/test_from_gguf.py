"""A GGUF file written as llama.cpp writes it, from a model that is known -> the same model and tokenizer."""

import json

import gguf
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from scripts.from_gguf import UnsupportedGGUFError, convert

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEXTS = ["a 1 a 12 a 123", "12345", "the cat,\n\tünï ☂", "<|im_start|>the 12<|im_end|>"]
HEADS, KV_HEADS, LAYERS = 4, 2, 2


def trained_bpe() -> Tokenizer:
    """Byte-level BPE that splits digits, learnt from a text where merging digits would pay."""
    tokenizer = Tokenizer(models.BPE())
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=CONTROL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat and the hat sat at the mat 1212121212"] * 50, trainer)
    return tokenizer


def random_llama(vocabulary: int, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def for_llama_cpp(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's convert_hf_to_gguf.py, `LlamaModel.permute`."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model: LlamaForCausalLM, bpe: Tokenizer, **changes) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    config, writer = model.config, gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary = sorted(bpe.get_vocab(), key=bpe.token_to_id)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in CONTROL else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in merges_of(bpe)])
    for add, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{add}_token_id")(token)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        if name in changes.get("without", ()) or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        values = for_llama_cpp(weight, heads) if heads else weight
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def merges_of(bpe: Tokenizer) -> list[list[str]]:
    return json.loads(bpe.to_str())["model"]["merges"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def converted(request, tmp_path_factory):
    """The model, its tokenizer, and the folder they came back in."""
    folder, bpe = tmp_path_factory.mktemp("gguf"), trained_bpe()
    model = random_llama(bpe.get_vocab_size(), tied=request.param)
    write_gguf(folder / "model.gguf", model, bpe)
    convert(folder / "model.gguf", folder, torch.float32)
    return model, bpe, folder


def test_the_logits_are_the_originals(converted):
    model, bpe, folder = converted
    tokens = torch.randint(0, bpe.get_vocab_size(), (3, 40), generator=torch.Generator().manual_seed(1))
    back = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(tokens).logits
        torch.testing.assert_close(back(tokens).logits, expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.1
    assert back.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert back.config.rms_norm_eps == 1e-5 and back.config.rope_parameters["rope_theta"] == 500


def test_the_tokens_are_the_originals(converted):
    _, bpe, folder = converted
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == bpe.encode(text).ids
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("1212") == ["1", "2", "1", "2"]
    assert tokenizer.tokenize("<|im_end|>") == ["<|im_end|>"]
    assert tokenizer.decode(tokenizer("<|im_end|>the")["input_ids"], skip_special_tokens=True) == "the"


def test_the_end_token_and_the_chat_template_come_along(converted):
    _, _, folder = converted
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    chat = [{"role": "user", "content": "the cat"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nthe cat<|im_end|>\n"
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba', and only llama is converted"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
        ({"without": ["model.norm.weight"]}, r"model.norm.weight \(has None, needs \(64,\)\)"),
    ],
    ids=["architecture", "tokenizer", "weights"],
)
def test_what_cannot_be_converted_is_named(changes, words, tmp_path):
    bpe = trained_bpe()
    write_gguf(tmp_path / "model.gguf", random_llama(bpe.get_vocab_size(), tied=True), bpe, **changes)
    with pytest.raises(UnsupportedGGUFError, match=words):
        convert(tmp_path / "model.gguf", tmp_path, torch.float32)
