"""What functional tests share: a small untrained model and the command as a process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.validation.compose import compose_config
from tests.functional.embedded import of_run

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# What tests start shares the machine's cores, also with another file's, and mostly imports: it keeps what it compiles.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["PYTHONPATH"] = PYTHONPATH
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """The embedded model without its warm start, in Hugging Face format."""
    from nemo_rl_lite.models.embedded import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    build_model(seed=0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def run_command(folder: Path, model: Path, *overrides: str) -> list[str]:
    """The command line of a run, each of whose processes computes with one thread."""
    return [sys.executable, "-m", "nemo_rl_lite.train", *of_run(folder, model), *overrides]


def train(
    folder: Path, model: Path, *overrides: str, plots: bool = False, timeout_s: float = 900
) -> tuple[str, list[dict]]:
    """A whole run through the command line; the console's text and the metrics, line by line."""
    command = run_command(folder, model, f"logger.plots={str(plots).lower()}", *overrides)
    environ = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environ)
    assert done.returncode == 0, done.stderr[-3000:] + "".join(p.read_text()[-2000:] for p in folder.glob("logs/*"))
    return done.stdout, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def engine_environment() -> dict[str, str]:
    """The environment in which the launcher runs vLLM."""
    own = ENGINES["vllm"].environment(compose_config().generation, False)
    return dict(os.environ) | own | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def random_experts(folder: Path, **own: Any) -> Path:
    """Write a small random Qwen3 with experts, two of them for each token, and these fields of its configuration."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from nemo_rl_lite.models.embedded import build_tokenizer

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **own,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
