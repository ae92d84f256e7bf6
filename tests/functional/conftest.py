"""What functional tests share: a small untrained model and a way to run ranks as processes."""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.rules.compose import compose_config

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# What tests start shares the machine's cores, also with another file's, and mostly imports: it keeps what it compiles.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What `train` keeps of a run's standard error, in its folder.
STDERR_FILE = "stderr.txt"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """The embedded model without its warm start, in Hugging Face format."""
    from nemo_rl_lite.models.embedded.build import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    build_model(seed=0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def free_ports(count: int = 40) -> int:
    """The first of `count` ports in a row that nobody has: below those that the kernel hands out and above Ray's, so
    that nobody comes to have them soon."""
    for first in random.sample(range(20_000, 32_000, count), 20):
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")


def run_ranks(script: Path, arguments: Sequence[str], ranks: int, timeout_s: float = 900) -> None:
    """Run `script` once a rank, with torch.distributed's environment; fails with what the ranks that failed printed."""
    port = free_ports()
    processes, folder = [], Path(tempfile.mkdtemp())
    try:
        for rank in range(ranks):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "MASTER_PORT": port,
                "CUDA_VISIBLE_DEVICES": rank,
            }
            own = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            environ = os.environ | own | {"PYTHONPATH": PYTHONPATH, "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, str(script), *arguments]
            with (folder / str(rank)).open("w") as output:
                processes.append(subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.returncode for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = {rank: (folder / str(rank)).read_text()[-4000:] for rank in range(ranks) if processes[rank].returncode}
    assert not outputs, "\n".join(f"rank {rank}:\n{text}" for rank, text in outputs.items())


def run_command(folder: Path, model: Path, *overrides: str) -> list[str]:
    """The command line of a run, each of whose processes computes with one thread."""
    own = [f"hydra.run.dir={folder}", f"policy.model_name={model}", "cluster.threads_per_worker=1"]
    return [sys.executable, "-m", "nemo_rl_lite.train", *own, *overrides]


def train(
    folder: Path, model: Path, *overrides: str, plots: bool = False, timeout_s: float = 900
) -> tuple[str, list[dict]]:
    """A whole run through the command line; the console's text and the metrics, line by line."""
    command = run_command(folder, model, f"logger.plots={str(plots).lower()}", *overrides)
    environ = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environ)
    assert done.returncode == 0, done.stderr[-3000:] + "".join(p.read_text()[-2000:] for p in folder.glob("logs/*"))
    (folder / STDERR_FILE).write_text(done.stderr)
    return done.stdout, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def engine_environment() -> dict[str, str]:
    """The environment in which the launcher runs vLLM."""
    own = ENGINES["vllm"].environment(compose_config().generation, False)
    return dict(os.environ) | own | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
