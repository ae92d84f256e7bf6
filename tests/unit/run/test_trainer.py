"""The Python API up to the run, whose place a stand-in takes; and the code of its page."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

import nemo_rl_lite
from nemo_rl_lite import DPO, GRPO, SFT, Distillation, TrainingResult
from nemo_rl_lite.errors import ConfigError, DataError, LauncherError
from nemo_rl_lite.models.embedded import NAME as EMBEDDED
from nemo_rl_lite.observability.summary import Summary
from nemo_rl_lite.run import trainer as trainer_module
from tests.unit.pages import DOCS, ROOT, blocks

ROWS = [{"prompt": f"{n}", "answer": f"{n}"} for n in range(200, 240)]
HELD_OUT = {"data": ROWS, "eval_data": ROWS[:4], "num_prompts_per_step": 16}
LAST = {"step": 1.0, "train/reward": 0.5, "validation/accuracy": 0.25, "validation/val_loss": 2.0}


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Configurations of the runs that would have been, in the order of their starts."""
    monkeypatch.chdir(tmp_path)
    started = []

    def run_in(folder, config, command, callbacks):
        started.append(config)
        logging.getLogger("the run").info("it runs: %s", command)
        os.environ["RAY_SOMETHING"] = "set"
        callbacks.step_done(1, [LAST])
        (folder / "hf").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps(LAST) + "\n")
        return Summary(str(folder), 1, *[None] * 6, 1.0, {}, {})

    monkeypatch.setattr(trainer_module, "run_in", run_in)
    return started


def test_the_package_imports_nothing_until_the_api_is_used():
    code = "import sys, nemo_rl_lite\nprint(len([name for name in sys.modules if name.startswith('nemo_rl_lite')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert set(nemo_rl_lite.__all__) <= set(dir(nemo_rl_lite))
    with pytest.raises(AttributeError, match="has no attribute 'PPO'"):
        _ = nemo_rl_lite.PPO


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "python_api.md", DOCS / "quickstart.md"], ids=lambda one: one.stem
)
def test_the_code_of_a_page_makes_valid_runs(page, runs, monkeypatch):
    monkeypatch.setattr(TrainingResult, "load", lambda self: (self.model_path, None))
    monkeypatch.setattr(TrainingResult, "model_path", EMBEDDED)
    monkeypatch.setattr("nemo_rl_lite.run.run.dry_run", lambda config, overrides, folder: runs.append(config))
    code = [text for text in blocks(page, "python") if "from nemo_rl_lite import" in text]
    assert code
    for text in code:
        exec(text.replace("Qwen/Qwen3-0.6B", EMBEDDED), {"__name__": "__main__"})
    assert runs


def test_values_of_every_kind_are_in_the_configuration(runs):
    factor = 2

    def score(response, answer):
        return factor * (response == answer)

    result = GRPO(
        reward=score, offload="logprob", policy={"precision": "float32"}, lr=1e-4, seed=3, output_dir="own", **HELD_OUT
    ).train()
    config = runs[0]
    assert config.reward.name.endswith(".pkl:score") and config.reward.name.startswith(str(result.folder / "inputs"))
    assert config.data.name == "file" and config.data.train_path.startswith(str(result.folder / "inputs" / "data-"))
    assert (config.policy.megatron_cfg.optimizer.lr, config.algorithm.seed) == (1e-4, 3)
    assert result.folder.name == "own" and result.metrics == LAST and result.history == [LAST]
    assert "it runs: nrl-lite train algorithm=grpo" in (result.folder / "train.log").read_text()


def test_data_is_a_file_a_dataset_of_the_hub_or_a_file_of_the_group(runs, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    GRPO(data="rows.jsonl", eval_data=tmp_path / "rows.jsonl", num_prompts_per_step=16).train()
    GRPO(data="openai/gsm8k", subset="main", eval_data="test", output_dir="second").train()
    GRPO(data="reverse_digits", output_dir="third").train()
    first, second, third = (one.data for one in runs)
    assert (first.train_path, first.validation_path) == ("rows.jsonl", str(tmp_path / "rows.jsonl"))
    assert (second.name, second.path, second.validation_split) == ("hub", "openai/gsm8k", "test")
    assert third.name == "reverse_digits"


def test_rewards_are_added_up_and_a_name_is_a_file_of_the_group(runs):
    pattern = {"reward.terms.format.kwargs": {"pattern": "."}}
    GRPO(reward=[lambda response, answer: 1.0, "format"], overrides=pattern).train()
    GRPO(reward={"exact_match": 0.5}, output_dir="second").train()
    GRPO(reward="math", output_dir="third", **HELD_OUT).train()
    first, second, third = (one.reward for one in runs)
    assert first.name.endswith(".pkl:lambda") and first.terms["format"].weight == 1
    assert second.name == "none" and second.terms["exact_match"].weight == 0.5
    assert third.name == "math"


def test_tools_and_an_environment_travel(runs):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        return a + b

    class Echo:
        async def step(self, problem, conversation): ...

    GRPO(tools=[add], max_turns=3).train()
    GRPO(environment={"name": Echo, "max_turns": 2}, output_dir="second").train()
    assert runs[0].environment.name == "tools" and runs[0].environment.kwargs["tools"][0].endswith(".pkl:add")
    assert runs[1].environment.name.endswith(".pkl:Echo") and runs[1].environment.max_turns == 2


def test_recipes_keep_their_algorithm_and_overrides_come_last(runs):
    GRPO(recipe="grpo-tiny-1n0g-cpu", seed=5, overrides=["algorithm.seed=7"]).train()
    assert runs[0].run_name == "grpo-tiny-1n0g-cpu" and runs[0].algorithm.seed == 7
    with pytest.raises(ConfigError, match=r"has algorithm=grpo, and DPO trains with dpo"):
        DPO(recipe="grpo-tiny-1n0g-cpu").train()
    assert len(runs) == 1


def test_all_problems_are_one_error_and_no_folder_is_made(runs, tmp_path):
    with pytest.raises(ConfigError) as error:
        GRPO(reward="mth", learning_rate=1e-4, data=ROWS, eval_data=ROWS[:4]).train()
    assert {one.key for one in error.value.violations} == {"reward", "learning_rate"}
    with pytest.raises(ConfigError, match=r"data.train_path = 'data'\n +data, row 1: no column 'prompt'"):
        GRPO(data=[{"question": "?"}], eval_data=ROWS).train()
    with pytest.raises(DataError, match=r"data=data\['train'\]"):
        SFT(data={"train": ROWS}).train()
    with pytest.raises(ConfigError, match=r"model\n +is a Module; the workers load"):
        SFT(torch.nn.Module(), data=ROWS, eval_data=ROWS).train()
    assert not runs and not list(tmp_path.iterdir())


def test_a_process_is_as_before(runs, monkeypatch):
    environ, handlers, level = dict(os.environ), logging.getLogger().handlers[:], logging.getLogger().level

    def fail(*_):
        os.environ["RAY_SOMETHING"] = "set"
        raise RuntimeError("a defect")

    GRPO().train()
    monkeypatch.setattr(trainer_module, "run_in", fail)
    with pytest.raises(RuntimeError):
        GRPO(output_dir="second").train()
    assert dict(os.environ) == environ
    assert (logging.getLogger().handlers, logging.getLogger().level) == (handlers, level)


def test_a_training_needs_the_main_thread_and_is_alone(runs):
    errors = []

    def elsewhere():
        with pytest.raises(LauncherError) as error:
            GRPO().train()
        errors.append(str(error.value))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with pytest.raises(LauncherError) as error:
        GRPO(on_step=lambda metrics: GRPO().train()).train()
    assert "main thread" in errors[0] and "run one at a time" in str(error.value)


def test_a_training_is_stopped_by_its_object(runs):
    trainer = GRPO(on_step=lambda metrics: trainer.stop())
    assert trainer.train().stopped


def test_a_plan_is_of_another_machine():
    small = Distillation(model=EMBEDDED, teacher={"model_name": EMBEDDED}).plan("H200")
    assert small.fits and dataclasses.is_dataclass(small)
    on_gpus = {"policy": "megatron_gpu", "generation": "vllm_gpu", "cluster.gpus_per_node": 64}
    assert GRPO(overrides=on_gpus).plan("H200").fits
