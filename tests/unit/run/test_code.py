"""A digest of a user's code changes with the code, and with nothing else."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nemo_rl_lite.run.evaluation.code import code_digests

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.data import RewardTerm
from nemo_rl_lite.rules.compose import compose_config

# The user's modules, and which of them the reward `grading.rewards.best.score` imports.
FILES = {
    "grading/__init__.py": "import grading.versions",
    "grading/versions.py": "VERSION = 1",
    "grading/rewards/__init__.py": "",
    "grading/rewards/best.py": "import json\nfrom .. import marks\nfrom .texts import strip\nfrom torch import nn",
    "grading/rewards/texts.py": "from nemo_rl_lite.rewards import text\nimport helping",
    "grading/marks.py": "def late():\n    import grading.late",
    "grading/late.py": "",
    "helping.py": "import grading.rewards.best",
    "grading/rewards/other.py": "",
    "unrelated.py": "",
}
UNREAD = ("grading/rewards/other.py", "unrelated.py")
USERS = "grading.rewards.best.score"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    # Packages are imported on the way, but not the modules in them.
    for name in ("grading", "grading.rewards", "grading.versions"):
        sys.modules.pop(name, None)
    assert not [name for name in sys.modules if name.startswith(("grading", "helping", "unrelated"))]


def reward(name: str, **terms: str) -> Config:
    config = compose_config([])
    own = replace(config.reward, name=name, terms={label: RewardTerm(one, 1.0) for label, one in terms.items()})
    return replace(config, reward=own)


@pytest.mark.parametrize("name", FILES)
def test_it_is_of_all_that_the_code_imports_of_the_users(folder, name):
    before = code_digests(reward(USERS))
    assert list(before) == ["reward.name"] and before == code_digests(reward(USERS))
    (folder / name).write_text(FILES[name] + "\n# changed")
    assert (code_digests(reward(USERS)) == before) == (name in UNREAD)


def test_a_file_may_import_modules_too(folder):
    (folder / "mine.py").write_text("import helping")
    before = code_digests(reward(f"{folder}/mine.py:score"))
    (folder / "grading" / "marks.py").write_text("")
    assert before and code_digests(reward(f"{folder}/mine.py:score")) != before


def test_a_broken_module_has_a_digest_too(folder):
    (folder / "grading" / "marks.py").write_text("def (")
    assert code_digests(reward(USERS))


def test_each_key_has_its_own(folder):
    config = reward("math", style="unrelated.score", length=USERS, plain="exact_match")
    config = replace(
        config,
        environment=replace(config.environment, name="tools", kwargs={"tools": ["unrelated.search"]}),
        agent=replace(config.agent, name="unrelated.play"),
    )
    found = code_digests(config)
    assert set(found) == {
        "reward.terms.style.name",
        "reward.terms.length.name",
        "environment.kwargs.tools, unrelated.search",
        "agent.name",
    }
    assert found["reward.terms.length.name"] != found["agent.name"] == found["reward.terms.style.name"]


def test_what_is_not_the_users_has_none(folder):
    for name in ("math", "nemo_rl_lite.rewards.text.exact_match", "json.loads", "torch.nn.Linear", "missing.score"):
        assert code_digests(reward(name)) == {}
