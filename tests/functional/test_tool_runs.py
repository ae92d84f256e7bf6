"""Runs whose environment offers tools: prompts have them, and a model that cannot write them is refused in time."""

import json
import shutil

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from nemo_rl_lite.rollout.store import rollout_files
from tests.functional.here import run_here, train_here
from tests.functional.test_failures import SMALL

pytestmark = pytest.mark.functional
PYTHON = ["environment=python", "policy.max_total_sequence_length=96", "generation.max_new_tokens=8"]


def test_every_prompt_of_a_run_offers_the_tools(tmp_path, model_folder):
    folder = tmp_path / "run"
    _, metrics = train_here(folder, model_folder, *SMALL, *PYTHON, "algorithm.max_num_steps=1")
    rows = [row for file in rollout_files(folder) for row in pyarrow.parquet.read_table(file).to_pylist()]
    assert rows and {json.loads(row["tools"])[0]["function"]["name"] for row in rows} == {"python"}
    # "<bos><tool=python(code)>", the digits, "=".
    assert {row["prompt_tokens"] - len(row["prompt"][0]["content"]) for row in rows} == {
        1 + len("<tool=python(code)>") + 1
    }
    assert any("train/loss" in line for line in metrics)


def test_a_model_whose_template_knows_no_tools_is_refused_before_anything_starts(tmp_path, model_folder):
    other = tmp_path / "model"
    shutil.copytree(model_folder, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}={% endfor %}"
    tokenizer.save_pretrained(other)
    refused = run_here(tmp_path / "run", other, *SMALL, *PYTHON)
    assert refused.returncode == 2 and "starting" not in refused.stdout
    assert "environment.name" in refused.stderr and "offers tools, but the chat template" in refused.stderr
    assert "environment.kwargs.call=block" in refused.stderr
