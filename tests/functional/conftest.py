"""What functional tests share: a small untrained model and a way to run ranks as processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_rl_lite.config.compose import compose_config
from nemo_rl_lite.generation.vllm.worker import environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """The embedded model without its warm start, in Hugging Face format."""
    from nemo_rl_lite.embedded.build import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    build_model(seed=0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def run_ranks(script: Path, arguments: Sequence[str], ranks: int, port: int) -> None:
    """Run `script` once a rank, with torch.distributed's environment; fails with the output of the first that fails."""
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        own = {name: str(value) for name, value in place.items()}
        command = [sys.executable, str(script), *arguments]
        environ = os.environ | own | {"PYTHONPATH": str(ROOT), "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        processes.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for rank, process in enumerate(processes):
        assert process.returncode == 0, f"rank {rank}:\n{outputs[rank][-4000:]}"


@pytest.fixture(scope="session")
def engine_environment() -> dict[str, str]:
    """The environment in which the launcher runs vLLM."""
    own = environment(compose_config().generation)
    return dict(os.environ) | own | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
