"""Secrets stay where they were given."""

import pytest

from nemo_rl_lite.observability.environment import HIDDEN, redact, redact_command, redact_text

CONFIG = {
    "reward": {"kwargs": {"api_key": "sk-1", "url": "https://me:pw@judge.example/v1", "max_tokens": 5}},
    "generation": {"vllm_kwargs": {"hf_token": "hf_2", "tokens": ["a"], "tokenizer_mode": "auto"}},
    "policy": {"train_mb_tokens": 7, "password": ""},
}


def test_what_its_key_calls_a_secret_is_hidden_and_nothing_else():
    hidden = redact(CONFIG)
    assert hidden["reward"]["kwargs"] == {
        "api_key": HIDDEN,
        "url": f"https://{HIDDEN}@judge.example/v1",
        "max_tokens": 5,
    }
    assert hidden["generation"]["vllm_kwargs"] == {"hf_token": HIDDEN, "tokens": ["a"], "tokenizer_mode": "auto"}
    assert hidden["policy"] == CONFIG["policy"] and CONFIG["reward"]["kwargs"]["api_key"] == "sk-1"


def test_the_command_line_too():
    command = (
        "python -m nemo_rl_lite.train +reward.kwargs.api_key=sk-1 'x=y z' policy.train_mb_tokens=7 a=http://u:p@h/"
    )
    assert redact_command(command) == (
        f"python -m nemo_rl_lite.train +reward.kwargs.api_key={HIDDEN} 'x=y z' policy.train_mb_tokens=7 "
        f"a=http://{HIDDEN}@h/"
    )
    assert redact_command("train '+reward.kwargs.api_key=sk 1'") == f"train +reward.kwargs.api_key={HIDDEN}"
    assert redact_command("train '+reward.kwargs.api_key=sk 1") == ""


@pytest.mark.parametrize(
    "text",
    [
        "{api_key: s3cret}",
        "reward.kwargs = {'api-key': 's3cret', 'n': 3}",
        "https://host/path?password=s3cret&n=3",
        "postgres://user:p@s3cret@host/db",
        "Authorization: Bearer s3cret",
        "https://host/blob?sig=s3cret&n=3",
        "+reward.kwargs.openai_key=s3cret",
        "logger.mlflow.tracking_uri=https://me:s3cret@host",
        "{pwd: s3cret}",
        "my_pat=s3cret",
        "passphrase: s3cret",
        "Cookie: s3cret",
    ],
)
def test_what_follows_the_name_of_a_secret_is_hidden(text):
    shown = redact_text(text)
    assert "s3cret" not in shown and HIDDEN in shown
    assert ("3" in shown) == ("3" in text.replace("s3cret", ""))


def test_what_only_looks_like_one_stays():
    plain = {"path": "a", "keynote": "b", "pattern": "c", "keep_newest": "2"} | {
        "max_new_tokens": "256",
        "author": "someone",
        "token_level_loss": "true",
        "text": "the tokens: 5 of 6",
    }
    assert redact(plain) == plain
    assert redact({"authorization": "Bearer s3cret"}) == {"authorization": HIDDEN}
