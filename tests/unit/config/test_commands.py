"""Command lines as users of NeMo-RL, verl and TRL, wrappers and sweeps type them: which start, and what others say."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_lite.config.keys import unknown_key
from nemo_rl_lite.config.overrides import check_overrides, given_keys
from nemo_rl_lite.run.command import jobs, split_arguments
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.validation.notes import notes

HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "numpy")
# Runs every command in one process. What is imported after all of them was imported by one.
SCRIPT = f"""
import contextlib, io, json, shlex, sys
from nemo_rl_lite import train
found = {{}}
for line in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            train.main(shlex.split(line))
            status = 0
        except SystemExit as end:
            status = end.code
    found[line] = [status, told.getvalue()]
print(json.dumps([found, [name for name in {HEAVY} if name in sys.modules]]))
"""


def lines(name: str) -> list[str]:
    text = (Path(__file__).parent / "commands" / f"{name}.txt").read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("line", lines("works"))
def test_a_command_that_starts(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags, overrides = split_arguments(shlex.split(line))
    for job in jobs(overrides) if flags.sweeps else [overrides]:
        told = list(notes(compose_config(job), given_keys(job)))
        assert all("\n" not in note for note in told) and len([note for note in told if "no effect" in note]) <= 1


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> dict[str, tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path_factory.mktemp("commands"),
        input=json.dumps(lines("fails")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, heavy = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    return found


@pytest.mark.parametrize("line", lines("fails"))
def test_a_command_that_cannot_start(line, failed):
    status, told = failed[line]
    assert status == 2 and told.startswith("configuration error: ") and "Traceback" not in told
    keys = [re.split("=| ", word.lstrip("~+"))[0] for word in shlex.split(line) if word != "-m"]
    assert any(key in told for key in keys) and "fix: " in told


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("model=Qwen/Qwen3-0.6B", "policy.model_name=Qwen/Qwen3-0.6B"),
        ("model_path=Qwen/Qwen3-0.6B", "policy.model_name=Qwen/Qwen3-0.6B"),
        ("steps=10", "algorithm.max_num_steps=10"),
        ("epochs=3", "algorithm.max_num_epochs=3"),
        ("algorithm=sft epochs=3", "algorithm.max_num_epochs=3"),
        ("trainer.total_epochs=3", "algorithm.max_num_epochs=3"),
        ("gpus=1", "cluster.gpus_per_node=1"),
        ("num_gpus=2", "cluster.gpus_per_node=2"),
        ("lora=true", "policy.megatron_cfg.peft.enabled=true"),
        ("wandb=true", "logger.wandb_enabled=true"),
        ("algorithm=ppo", "algorithm=grpo"),
        ("group_size=8", "algorithm.num_generations_per_prompt=8"),
        ("actor_rollout_ref.rollout.n=8", "algorithm.num_generations_per_prompt=8"),
        ("per_device_train_batch_size=8", "policy.train_micro_batch_size=8"),
        ("beta=0.04", "algorithm.loss_fn.reference_policy_kl_penalty=0.04"),
        ("algorithm=dpo beta=0.04", "algorithm.reference_policy_kl_penalty=0.04"),
        ("tp=1", "policy.megatron_cfg.tensor_model_parallel_size=1"),
        ("reward_fn=tests.unit.validation.own.score", "reward.name=tests.unit.validation.own.score"),
        ("policy.lr=1e-4", "policy.megatron_cfg.optimizer.lr=1e-4"),
        ("actor_rollout_ref.rollout.name=vllm", "generation=vllm"),
        ("trainer.logger=[console,wandb]", "logger.wandb_enabled=true"),
    ],
)
def test_a_fix_works_when_it_is_typed(given, fix, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    accepted, violations = check_overrides(given.split())
    assert len(violations) == 1 and re.match(rf"{re.escape(fix)}(?![\w.])", violations[0].fix)
    rest = accepted if "dpo" not in given else [*accepted, "data=file"]
    if "wandb" in fix:
        fix += " logger.wandb.mode=offline"
    if "dpo" not in given:
        compose_config([*rest, *fix.split()])


def test_a_name_of_another_algorithm_says_which():
    assert unknown_key("num_generations", "8", "sft").fix == (
        "algorithm.num_generations_per_prompt=8, which needs algorithm=grpo"
    )
