"""The files of docs/tutorial.md make an experiment whose commands compose and whose reward grades its rows."""

import json
import runpy

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.rewards.registry import find_reward
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.pages import DOCS, blocks, commands

PAGE = DOCS / "tutorial.md"


def test_the_files_of_the_page_are_an_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in [*blocks(PAGE, "python"), *blocks(PAGE, "yaml")]:
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    runpy.run_path("rows.py")
    # The reader downloads the model, and may have the GPU.
    here = ["policy.model_name=embedded:reverse-digits", "data.too_long=drop"]
    trainings = [words[2:] for words in commands(PAGE) if words[:3] == ["nrl-lite", "train", "sums.yaml"]]
    [on_cpus] = [words for words in trainings if "policy=megatron" in words]
    configs = [compose_config([*on_cpus, *here])]
    assert len(trainings) == 3
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    reward = find_reward(configs[0].reward.name, {})
    for row in rows:
        problem = Problem((), row["answer"])
        assert reward(f"3 and so {row['answer']}", problem) == 1.0 and reward("99", problem) == 0.0
