import json

import pytest

from nemo_rl_lite.data.examples import Encoder, TrainingExamples, training_examples, validation_examples
from nemo_rl_lite.data.formats import chat_of
from nemo_rl_lite.data.problems import Derived, Problem
from nemo_rl_lite.data.tasks import ReverseDigits
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.models.embedded import build_tokenizer
from nemo_rl_lite.validation.compose import compose_config

CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 12"},
)


def encoder(folder, template: str | None = CHATML, max_length: int = 200, too_long="error") -> Encoder:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Encoder(ChatTokenizer(folder), max_length, too_long)


def masked_texts(encoder: Encoder, problems: list[Problem]) -> list[str]:
    """Return the trained tokens of each row, as text with special tokens."""
    return trained_texts(encoder.rows(list(map(chat_of, problems))))


def trained_texts(rows: list[TokenRow]) -> list[str]:
    decode = build_tokenizer().decode
    return [decode([token for token, on in zip(row.tokens, row.mask, strict=True) if on]) for row in rows]


def test_the_loss_is_on_the_response_and_its_end_token_alone(tmp_path):
    problems = [Problem(TURNS, "12 is a dozen"), Problem(TURNS[1:2], "4")]
    chats = encoder(tmp_path)
    assert masked_texts(chats, problems) == ["12 is a dozen<eos>", "4<eos>"]
    rows = chats.rows(list(map(chat_of, problems)))
    assert [len(row.tokens) for row in rows] == [
        len(chats.tokenizer.prompt(p.messages)) + len(p.answer) + 1 for p in problems
    ]
    assert all(len(row.mask) == len(row.tokens) and row.mask[-1] for row in rows)


def test_the_tokens_are_the_beginning_of_the_whole_templated_chat(tmp_path):
    problem = Problem(TURNS, "12 is a dozen")
    (row,) = encoder(tmp_path).rows([chat_of(problem)])
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    whole = [*TURNS, {"role": "assistant", "content": problem.answer}]
    expected = tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"]
    assert (
        row.tokens == expected[: len(row.tokens)] and len(expected) == len(row.tokens) + 1
    )  # the line end after <eos>


def test_the_response_is_what_the_template_makes_of_it(tmp_path):
    trimming = CHATML.replace("m.content", "m.content | trim")
    assert masked_texts(encoder(tmp_path, trimming), [Problem(TURNS, " 12 \n")]) == ["12<eos>"]
    thinking = CHATML.replace(
        "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<>{% endif %}{{ m.content }}"
    )
    assert masked_texts(encoder(tmp_path, thinking), [Problem(TURNS, "12")]) == ["<>12<eos>"]


def test_without_a_template_the_response_follows_the_prompt(tmp_path):
    assert masked_texts(encoder(tmp_path, None), [Problem(TURNS[1:2], "4")]) == ["4<eos>"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML.replace("<eos>", "[end]"), "does not write the response and then its end token <eos>"),
        (CHATML.replace("{{ m.content }}", "?"), "does not write the response"),
        ("{{ messages | length }}" + CHATML, "changes the prompt when the response follows"),
    ],
    ids=["other end", "no response", "other prompt"],
)
def test_a_template_that_cannot_be_trained_on_is_an_error(template, words, tmp_path):
    with pytest.raises(DataError, match=words):
        encoder(tmp_path, template).rows([chat_of(Problem(TURNS[1:2], "4"))])


def sft_config(folder, rows: list[dict], *overrides: str):
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [f"data.{kind}_path={folder / 'train.jsonl'}" for kind in ("train", "validation")]
    return compose_config(["algorithm=sft", "data=file", *paths, *overrides])


ROWS = [{"prompt": str(number), "answer": "7", "solution": f"it is {number}"} for number in range(10)]
SMALL = ["policy.train_global_batch_size=4", "policy.train_micro_batch_size=4"]


def test_an_epoch_has_whole_batches_of_different_rows_and_steps_repeat(tmp_path):
    data = training_examples(sft_config(tmp_path, ROWS, *SMALL), encoder(tmp_path))
    assert data.steps_per_epoch == 2
    epochs = [[tuple(row.tokens) for step in (first, first + 1) for row in data.rows(step)] for first in (0, 2)]
    assert all(len(set(epoch)) == 8 for epoch in epochs) and epochs[0] != epochs[1]
    again = training_examples(sft_config(tmp_path, ROWS, *SMALL), encoder(tmp_path))
    assert again.rows(3) == data.rows(3)


def test_chats_that_are_too_long_are_errors_or_dropped(tmp_path, caplog):
    rows = [*ROWS[:5], {"prompt": "long", "answer": "x" * 30}]
    config = sft_config(tmp_path, rows, *SMALL)
    with pytest.raises(DataError, match=r"train.jsonl, row 6: prompt and response have .*data.too_long=drop"):
        training_examples(config, encoder(tmp_path, max_length=40))
    words = r"row 6: prompt and response have \d+ tokens.* It is the longest of 6 rows"
    with pytest.raises(DataError, match=words):
        training_examples(config, encoder(tmp_path, max_length=20))
    data = training_examples(config, encoder(tmp_path, max_length=40, too_long="drop"))
    assert len(data.examples.finite()) == 5 and "1 of 6 chats are longer" in caplog.text
    with pytest.raises(DataError, match="no chats are left to validate on"):
        validation_examples(config, encoder(tmp_path, max_length=5, too_long="drop"))


def test_generated_data_never_ends(tmp_path):
    chats = encoder(tmp_path)
    data = TrainingExamples(Derived(ReverseDigits(4, seed=0), chat_of), chats, 3, 0)
    assert data.steps_per_epoch is None
    assert data.rows(5) != data.rows(6)
