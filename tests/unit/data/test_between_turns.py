"""The text between two assistant turns agrees with the chat template's own rendering of the whole chat."""

import pytest

from nemo_rl_lite.data.conversations import answered
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.models.embedded.build import build_tokenizer

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Like Qwen3's, this template leaves thoughts out of earlier turns, so its whole chat differs from what was sampled.
THINKING = CHATML.replace("{{ m.content }}", "{{ m.content.split('/')[-1] }}")
STRICT = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
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


@pytest.mark.parametrize("template", [CHATML, build_tokenizer().chat_template])
def test_prompt_turn_and_what_follows_are_the_templates_own_rendering(make, template):
    tokenizer = make(template)
    tokens, trained = tokenizer.conversation(answered(QUESTION, "7"))
    turn = [token for token, mark in zip(tokens, trained, strict=True) if mark]
    whole = tokenizer.prompt([*QUESTION, {"role": "assistant", "content": "7"}, *REPLY])
    assert [*tokenizer.prompt(QUESTION), *turn, *tokenizer.between_turns(REPLY, turn[-1])] == whole


def test_an_end_token_that_was_not_sampled_is_written(make):
    tokenizer = make(CHATML)
    sampled, cut = tokenizer.between_turns(REPLY, tokenizer.end_token), tokenizer.between_turns(REPLY, 5)
    assert cut == [tokenizer.end_token, *sampled]


def test_a_template_that_rewrites_earlier_turns_does_not_touch_what_was_sampled(make):
    tokenizer = make(THINKING)
    assert tokenizer.between_turns(REPLY, tokenizer.end_token) == make(CHATML).between_turns(REPLY, tokenizer.end_token)


def test_without_a_template_messages_are_lines(make):
    tokenizer = make(None)
    assert tokenizer.between_turns(REPLY, tokenizer.end_token) == tokenizer._tokens("\n34")


def test_a_role_the_template_refuses_is_named(make):
    with pytest.raises(DataError, match="cannot write messages of the role tool: no tools"):
        make(STRICT).between_turns([{"role": "tool", "content": "1"}], 0)
    with pytest.raises(DataError, match="leaves out the assistant's earlier turns"):
        make("{{ messages[-1].content }}").between_turns(REPLY, 0)
