"""scripts/config_reference.py documents every key and file of configs/."""

import shutil
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from nemo_rl_lite.config.keys import config_dir
from nemo_rl_lite.config.schema import Config
from tests.unit.pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import config_reference
from config_comments import UndocumentedError, read_comments
from config_reference import PAGE, Reference
from config_words import kind, prose, shown

SCHEMA = TypeAdapter(Config).json_schema()


def test_the_page_is_up_to_date(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["config_reference.py", "--check"])
    config_reference.main()
    stale = tmp_path / "configuration.md"
    stale.write_text(PAGE.read_text().replace("what it does", "what it did"))
    monkeypatch.setattr(config_reference, "PAGE", stale)
    with pytest.raises(SystemExit, match="is not what configs/ and the schema say"):
        config_reference.main()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy configs/."""
    return shutil.copytree(config_dir(), tmp_path / "configs")


def without_comment(file: Path, key: str) -> None:
    """Remove the comment above a key."""
    lines = file.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
    start = place
    while lines[start - 1].strip().startswith("#"):
        start -= 1
    assert start < place
    file.write_text("\n".join([*lines[:start], "", *lines[place:]]) + "\n")


@pytest.mark.parametrize(
    ("file", "key", "named"),
    [
        ("logger/default.yaml", "plots", "logger.plots"),
        ("policy/megatron.yaml", "adam_eps", "policy.megatron_cfg.optimizer.adam_eps"),
        ("algorithm/sft.yaml", "early_stop_patience", "algorithm.early_stop_patience"),
        ("offload/none.yaml", "overlap_offload", "policy.overlap_offload"),
    ],
)
def test_a_key_without_a_comment_is_an_error_that_names_it(folder, file, key, named):
    without_comment(folder / file, key)
    with pytest.raises(UndocumentedError, match=rf"^{named}: .*{file.split('/')[-1]}"):
        Reference(folder, SCHEMA).page()


def test_a_file_without_a_comment_is_an_error_that_names_it(folder):
    (folder / "reward" / "math.yaml").write_text("name: math\n")
    with pytest.raises(UndocumentedError, match=r"configs/reward/math.yaml: no comment at its top"):
        Reference(folder, SCHEMA).page()


def test_comments_belong_to_the_keys_below_them(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text(
        "# About the file.\n\n# The first,\n# not the second.\na: 1\nb: 2\n\nc: 3\n"
        "# A section.\nd:\n  e: 4\n  # Inner:\n  #   run it\n  f: 5\n"
    )
    comments = read_comments(file)
    assert comments.header == "About the file."
    assert comments.keys == {"a": "The first, not the second.", "d": "A section.", "d.f": "Inner: `run it`"}


def test_types_and_defaults_in_words():
    properties = SCHEMA["$defs"]["CheckpointConfig"]["properties"]
    assert kind(properties["save_period"]) == "integer ≥ 0"
    assert kind(properties["resume_from"]) == "text or null"
    assert kind(SCHEMA["$defs"]["MegatronConfig"]["properties"]["activation_offload_fraction"]) == "number > 0 and ≤ 1"
    assert shown({"a.b": "${.c}"}, "a.b") == "that of `a.c`"
    assert shown({"a": "${oc.decode:${oc.env:SOME,2}}"}, "a") == "`2`, or the environment's `SOME`"
    assert shown({"a": [1, None]}, "a") == "`[1, null]`"


def test_names_in_comments_become_code():
    assert prose("as max_num_steps, or data=file.") == "as `max_num_steps`, or `data=file`."
    assert prose("a | b <c>, as of Qwen2.5-0.5B") == "a \\| b &lt;c>, as of Qwen2.5-0.5B"
