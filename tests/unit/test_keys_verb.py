"""`nrl-lite keys` finds keys by their names, else by their sentences."""

import pytest

from nemo_rl_lite import keys
from nemo_rl_lite.config.keys import known_keys
from nemo_rl_lite.config.reference import Reference


def found(capsys, *words: str) -> list[str]:
    keys.main(list(words))
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]


def test_every_key_has_one_entry():
    entries = [one.key for one in Reference.of_package().entries()]
    leaves = {key for key in known_keys() if not any(other.startswith(f"{key}.") for other in known_keys())}
    assert len(entries) == len(set(entries)) and leaves <= {*entries}


def test_names_come_before_sentences(capsys):
    assert "algorithm.rollouts.source" in found(capsys, "Rollouts", "source")
    # No key has this in its name.
    assert found(capsys, "warm-up")


def test_a_word_that_no_key_has_is_answered_with_a_near_one(capsys):
    with pytest.raises(SystemExit) as end:
        keys.main(["oversmple"])
    assert end.value.code == 1 and "did you mean oversample?" in capsys.readouterr().err
