"""`nrl-lite keys` finds keys by their names, else by their sentences."""

import pytest

from nemo_rl_lite import keys
from nemo_rl_lite.config.keys import known_keys
from nemo_rl_lite.config.reference import entries


def keys_of(capsys, *words: str) -> list[str]:
    keys.main(list(words))
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]


def test_every_key_has_one_entry():
    found = [one.key for one in entries()]
    leaves = {key for key in known_keys() if not any(other.startswith(f"{key}.") for other in known_keys())}
    assert len(found) == len(set(found)) and leaves <= {*found}


def test_names_come_before_sentences(capsys):
    assert "algorithm.rollouts.source" in keys_of(capsys, "Rollouts", "source")
    # No key has this in its name.
    assert keys_of(capsys, "warm-up")


def test_a_word_that_no_key_has_is_answered_with_a_near_one(capsys):
    with pytest.raises(SystemExit) as end:
        keys.main(["oversmple"])
    assert end.value.code == 1 and "did you mean oversample?" in capsys.readouterr().err
