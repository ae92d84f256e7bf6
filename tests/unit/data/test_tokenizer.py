"""Turns and the texts between them agree with the chat template's own rendering; odd texts of rows are told."""

import json
from dataclasses import replace

import pytest
from tokenizers.processors import TemplateProcessing

from nemo_rl_lite.data.formats import Conversation, Example, answered, chat_of
from nemo_rl_lite.data.problems import FileSet, Problem, chat
from nemo_rl_lite.data.tokenizer import ChatTokenizer, check_stop_strings, check_texts, load_tokenizer
from nemo_rl_lite.errors import ConfigError, DataError
from nemo_rl_lite.models.embedded import build_tokenizer

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Like Qwen3's, this template leaves thoughts out of earlier turns, so its whole chat differs from what was sampled.
THINKING = CHATML.replace("{{ m.content }}", "{{ m.content.split('/')[-1] }}")
END, OWN = build_tokenizer().eos_token_id, build_tokenizer().chat_template
QUESTION = [{"role": "user", "content": "12"}]
REPLY = [{"role": "user", "content": "34"}]


@pytest.fixture
def make(tmp_path):
    def make(template: str | None) -> ChatTokenizer:
        tokenizer = build_tokenizer()
        tokenizer.add_tokens(list("<>/\nuserassistanttool"))
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return ChatTokenizer(tmp_path)

    return make


@pytest.mark.parametrize("template", [CHATML, OWN])
def test_prompt_turn_and_what_follows_are_the_templates_own_rendering(make, template):
    tokenizer = make(template)
    tokens, trained = tokenizer.conversation(answered(QUESTION, "7"))
    turn = [token for token, mark in zip(tokens, trained, strict=True) if mark]
    whole = tokenizer.prompt([*QUESTION, {"role": "assistant", "content": "7"}, *REPLY])
    assert [*tokenizer.prompt(QUESTION), *turn, *tokenizer.between_turns(REPLY, turn[-1])] == whole


@pytest.mark.parametrize("template", [CHATML, OWN])
def test_the_rest_of_a_chat_may_have_assistant_turns(make, template):
    tokenizer = make(template)
    one, other = ({"role": "assistant", "content": text} for text in ("7", "8"))
    chat = [*QUESTION, one, *REPLY, other, *REPLY, one, *QUESTION]
    whole, start = tokenizer.prompt(chat), [*tokenizer.prompt(QUESTION), *tokenizer._tokens("7"), END]
    assert [*start, *tokenizer.continuation(chat, 2, END)] == whole
    # An end token that was not sampled is written.
    assert [*start[:-1], *tokenizer.continuation(chat, 2, start[-2])] == whole
    assert tokenizer.continuation(chat[:3], 2, END) == tokenizer.between_turns(REPLY, END)


def test_an_end_token_that_was_not_sampled_is_written(make):
    tokenizer = make(CHATML)
    sampled, cut = tokenizer.between_turns(REPLY, END), tokenizer.between_turns(REPLY, 5)
    assert cut == [END, *sampled]


def test_a_template_that_rewrites_earlier_turns_does_not_touch_what_was_sampled(make):
    tokenizer = make(THINKING)
    assert tokenizer.between_turns(REPLY, END) == make(CHATML).between_turns(REPLY, END)


def test_without_a_template_messages_are_lines(make):
    tokenizer = make(None)
    assert tokenizer.between_turns(REPLY, END) == tokenizer._tokens("\n34")


@pytest.fixture
def gemma_like(tmp_path) -> ChatTokenizer:
    """A tokenizer whose turns end with another token than its own end token, as those of Gemma and Qwen's base
    models."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>", "<start_of_turn>"]})
    tokenizer.add_tokens(list("\nusermodel"))
    tokenizer.chat_template = (
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ).replace("{{ m.role }}", "{{ 'model' if m.role == 'assistant' else m.role }}")
    tokenizer.save_pretrained(tmp_path)
    return ChatTokenizer(tmp_path)


def test_a_turn_ends_with_the_token_that_the_template_writes(gemma_like):
    end = gemma_like._tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert set(gemma_like.end_tokens) == {END, end} and end != END
    tokens, trained = gemma_like.conversation(answered(QUESTION, "7"))
    turn = [token for token, mark in zip(tokens, trained, strict=True) if mark]
    assert turn == [*gemma_like._tokens("7"), end]
    whole = gemma_like.prompt([*QUESTION, {"role": "assistant", "content": "7"}, *REPLY])
    assert [*gemma_like.prompt(QUESTION), *turn, *gemma_like.between_turns(REPLY, end)] == whole


def test_every_turn_of_such_a_chat_can_be_trained_on(gemma_like):
    answers = [{"role": "assistant", "content": "7"}, {"role": "assistant", "content": "8"}]
    said = Conversation((*QUESTION, answers[0], *REPLY, answers[1]), 1)
    tokens, trained = gemma_like.conversation(said)
    shown = gemma_like._tokenizer.decode([token for token, mark in zip(tokens, trained, strict=True) if mark])
    assert shown.replace(" ", "") == "7<end_of_turn>8<end_of_turn>"


def test_a_tokenizer_that_adds_an_end_token_does_not_end_the_prompt(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", END)])
    tokenizer.save_pretrained(tmp_path)
    own = ChatTokenizer(tmp_path)
    assert own._tokenizer("12")["input_ids"][-1] == END and own.prompt(QUESTION)[-1] != END
    tokens, _ = own.conversation(answered(QUESTION, "7"))
    assert tokens == [*own.prompt(QUESTION), *own._tokens("7"), END]


USERS_ALONE = "{% for m in messages if m.role != 'system' %}{{ m.content }}<eos>{% endfor %}"


def rows(*texts: tuple[str, str], system: str | None = None) -> FileSet[Problem]:
    return FileSet(tuple(Problem(chat(asked, system), answer) for asked, answer in texts), 0, shuffle=False)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (rows(("<bos>12=", "21"), ("13", "31")), "1 of 2 rows have special tokens of the model as text"),
        (rows(("12", "21<eos>")), "such as '<eos>' in '21<eos>'"),
        (rows(("12 <= 3", "yes"), system="be brief"), ""),
    ],
)
def test_texts_that_the_model_does_not_write(data, words, make, caplog):
    check_texts(make(OWN), data)
    assert words in caplog.text and bool(caplog.messages) == bool(words)


def test_chats_are_looked_at_as_well(make, caplog):
    chats = tuple(map(chat_of, rows(("12", "21<eos>")).finite()))
    check_texts(make(OWN), FileSet(chats, 0, shuffle=False))
    assert "1 of 1 rows have special tokens" in caplog.text


def test_a_template_that_leaves_out_the_system_message(make, caplog):
    made = make(USERS_ALONE)
    check_texts(made, rows(("12", "21")))
    assert not caplog.messages
    check_texts(made, rows(("12", "21"), system="be brief"))
    assert "chat template omits system messages" in caplog.text


@pytest.mark.parametrize("tool", [{"function": {"name": "find"}}, {"name": "find"}])
def test_a_template_that_leaves_out_tools(make, tool, caplog):
    plain = answered(QUESTION, "7")
    chats = (Example((replace(plain, tools=(tool,)),), "row 1"), Example((plain,), "row 2"))
    writing = "{% for t in tools or [] %}{{ (t.function or t).name }}{% endfor %}"
    check_texts(make(writing + CHATML), FileSet(chats, 0, shuffle=False))
    check_texts(make(CHATML), FileSet(chats[1:], 0, shuffle=False))
    assert not caplog.messages
    check_texts(make(CHATML), FileSet(chats, 0, shuffle=False))
    assert "1 of 2 rows have tools, which the model's chat template omits" in caplog.text


def test_a_template_that_leaves_out_the_user(make):
    with pytest.raises(ConfigError, match="omits user messages"):
        check_texts(make("{% for m in messages %}{{ m.text }}{% endfor %}"), rows(("12", "21")))


def test_a_stop_string_that_no_text_has(make):
    made = make(OWN)
    # An end token ends the response anyway.
    check_stop_strings(made, ["<eos>", "</answer>"])
    with pytest.raises(ConfigError, match=r"generation\.stop_token_ids=\[1\]"):
        check_stop_strings(made, ["<bos>"])


def test_a_token_that_the_model_has_no_row_for_is_named(make, tmp_path):
    size = len(make(CHATML).vocabulary)
    added = load_tokenizer(tmp_path)
    added.add_tokens(["@"])
    added.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
    tokenizer = ChatTokenizer(tmp_path)
    assert tokenizer.prompt(QUESTION)
    for tokenize in (tokenizer.opening, lambda text: tokenizer.prompt([{"role": "user", "content": text}])):
        with pytest.raises(DataError, match=rf"'@' \({size}\) is beyond vocab_size = {size} of"):
            tokenize("12@")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": END}}))
    with pytest.raises(ConfigError, match="is beyond vocab_size"):
        ChatTokenizer(tmp_path)


def test_a_template_without_a_system_role_names_the_key(make):
    tokenizer = make("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML)
    with pytest.raises(DataError, match=r"no system role; leave out data\.system_prompt"):
        tokenizer.prompt([{"role": "system", "content": "1"}, *QUESTION])
    tokenizer = make("{{ raise_exception('broken') }}")
    with pytest.raises(DataError, match=r"broken$"):
        tokenizer.prompt([{"role": "system", "content": "1"}, *QUESTION])


def test_the_samples_of_a_group_tokenize_their_prompt_once(make, monkeypatch):
    chats, texts = make(CHATML), []
    tokenized = chats._tokens
    monkeypatch.setattr(chats, "_tokens", lambda text: texts.append(text) or tokenized(text))
    first, second = (chats.prompt(QUESTION) for _ in range(2))
    first.append(0)
    assert first[:-1] == second and len(texts) == 1
