"""Paths of the verbs that write something."""

import pytest

from nemo_rl_lite import export, report
from nemo_rl_lite.host.paths import local_path


def test_a_path_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/x") == tmp_path / "x" and str(local_path("a/~")) == "a/~"


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        (export, ["run", "s3://bucket/model"]),
        (export, ["hf://run"]),
        (report, ["run", "--output", "s3://bucket/page.html"]),
        (report, ["run", "--output", "~nobody-here/page.html"]),
    ],
)
def test_what_is_no_path_of_this_machine(verb, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        verb.main(arguments)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and arguments[-1] in said and "Traceback" not in said
