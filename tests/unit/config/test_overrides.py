"""What the command line names."""

import pytest

from nemo_rl_lite.config.keys import parse_override
from nemo_rl_lite.config.overrides import check_overrides, named_run_folder


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], None),
        (["algorithm.seed=1"], None),
        (["hydra.run.dir=outputs/a"], "outputs/a"),
        (["++hydra.run.dir=outputs/a"], "outputs/a"),
        (["hydra.run.dir='run folder'"], "run folder"),
        (["hydra.run.dir=a", 'hydra.run.dir="b=c"', "algorithm.seed=1"], "b=c"),
        (["hydra.run.dir=outputs/${run_name}"], "outputs/${run_name}"),
        (["hydra.sweep.dir=outputs/a"], None),
    ],
)
def test_the_runs_folder_as_hydra_reads_it(arguments, folder):
    assert named_run_folder(arguments) == folder


@pytest.mark.parametrize("value", ["~/rows.jsonl", "'~/rows.jsonl'", '"~/rows.jsonl"'])
def test_a_path_at_home_needs_no_quotes(value):
    (override,), wrong = check_overrides([f"data.train_path={value}"])
    assert not wrong and parse_override(override).value() == "~/rows.jsonl"


def test_a_folder_at_home_is_written_out_for_hydra(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert named_run_folder(["hydra.run.dir='~/it\\'s'"]) == "/home/me/it's"
    given = ["hydra.run.dir='~/it\\'s'", "run_name='~x'"]
    assert check_overrides(given) == (["hydra.run.dir='/home/me/it\\'s'", "++run_name='~x'"], [])
    assert parse_override(check_overrides(given)[0][0]).value() == "/home/me/it's"
    assert check_overrides(["hydra.run.dir=outputs/${run_name}"])[0] == ["hydra.run.dir=outputs/${run_name}"]
