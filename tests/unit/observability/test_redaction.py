"""Secrets stay where they were given."""

from nemo_rl_lite.observability.redaction import HIDDEN, redact, redact_command

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
