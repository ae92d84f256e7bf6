"""Drafts with a model on a GPU: vLLM's newer runner, CUDA graphs, sleep, and pauses."""

import json
import os
from pathlib import Path

import pytest

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.validation.compose import compose_config
from tests.draft_models import eagle3_head
from tests.functional.conftest import PYTHONPATH
from tests.functional.ranks import run_script
from tests.gpu.test_run import SMALL, check, run

pytestmark = pytest.mark.gpu


def speculating(head: Path | str) -> list[str]:
    return ["generation.speculation=eagle3", f"generation.draft_model={head}", "generation.draft_tokens=3"]


@pytest.fixture
def head(gpu_model, tmp_path) -> Path:
    return eagle3_head(tmp_path / "head", json.loads((gpu_model / "config.json").read_text()), layers=(1, 2, 3))


def test_a_head_keeps_its_weights_while_its_engine_sleeps(gpu_model, head, tmp_path):
    own = ENGINES["vllm"].environment(compose_config([*SMALL, "cluster.gpus_per_node=1"]).generation, True)
    environ = dict(os.environ) | own | {"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"}
    run_script(Path(__file__).with_name("draft_process.py"), [gpu_model, head], environ, tmp_path / "log")


def test_logprobs_are_exact_while_drafts_come_and_go_and_the_engine_sleeps(gpu_model, head, tmp_path):
    # Enough decode steps for a measurement with drafts and one without.
    length = ["policy.max_total_sequence_length=128", "generation.max_new_tokens=96"]
    metrics = run(tmp_path / "run", gpu_model, 1, "generation.colocated.sleep=true", *length, *speculating(head))
    check(metrics)
    steps = [line for line in metrics if "train/loss" in line]
    assert any("performance/speculation_acceptance" in line for line in steps)
    assert any(line["performance/speculation_paused"] > 0 for line in steps)


def test_a_smaller_model_drafts_with_its_own_weights_after_a_sleep(gpu_model, tmp_path):
    """The draft is the untrained policy. At a low temperature most of its tokens are right."""
    own = ["generation.speculation=draft_model", f"generation.draft_model={gpu_model}", "generation.temperature=0.1"]
    own += ["generation.colocated.sleep=true", "policy.megatron_cfg.optimizer.lr=1e-7"]
    metrics = run(tmp_path / "run", gpu_model, 1, *own)
    check(metrics)
    found = [line.get("performance/speculation_acceptance") for line in metrics if "train/loss" in line]
    assert min(one for one in found if one is not None) > 0.3
