"""What is odd about the texts of rows for a model's tokenizer and chat template."""

import pytest

from nemo_rl_lite.data.formats import chat_of
from nemo_rl_lite.data.problems import FileSet, Problem, chat
from nemo_rl_lite.data.text_checks import check_stop_strings, check_texts
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.embedded import build_tokenizer

USERS_ALONE = "{% for m in messages if m.role != 'system' %}{{ m.content }}<eos>{% endfor %}"


def tokenizer(folder, template: str | None = None) -> ChatTokenizer:
    made = build_tokenizer()
    made.chat_template = template or made.chat_template
    made.save_pretrained(folder)
    return ChatTokenizer(folder)


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
def test_texts_that_the_model_does_not_write(data, words, tmp_path, caplog):
    check_texts(tokenizer(tmp_path), data)
    assert words in caplog.text and bool(caplog.messages) == bool(words)


def test_chats_are_looked_at_as_well(tmp_path, caplog):
    chats = tuple(map(chat_of, rows(("12", "21<eos>")).finite()))
    check_texts(tokenizer(tmp_path), FileSet(chats, 0, shuffle=False))
    assert "1 of 1 rows have special tokens" in caplog.text


def test_a_template_that_leaves_out_the_system_message(tmp_path, caplog):
    made = tokenizer(tmp_path, USERS_ALONE)
    check_texts(made, rows(("12", "21")))
    assert not caplog.messages
    check_texts(made, rows(("12", "21"), system="be brief"))
    assert "chat template leaves out system messages" in caplog.text


def test_a_template_that_leaves_out_the_user(tmp_path):
    with pytest.raises(ConfigError, match="leaves out what the user says"):
        check_texts(tokenizer(tmp_path, "{% for m in messages %}{{ m.text }}{% endfor %}"), rows(("12", "21")))


def test_a_stop_string_that_no_text_has(tmp_path):
    made = tokenizer(tmp_path)
    # An end token ends the response anyway.
    check_stop_strings(made, ["<eos>", "</answer>"])
    with pytest.raises(ConfigError, match=r"generation\.stop_token_ids=\[1\]"):
        check_stop_strings(made, ["<bos>"])
