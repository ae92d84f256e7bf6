"""A lost policy rank on GPUs costs one process: NCCL's abort frees the other, which builds again."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.functional.conftest import PYTHONPATH, run_command
from tests.functional.lost_policy import describe, lose_a_rank
from tests.functional.test_recovery import processes
from tests.gpu.test_run import SMALL

pytestmark = pytest.mark.gpu(2)

TWO = ["policy=megatron_gpu", "cluster.gpus_per_node=2", "policy.sequence_length_round=16"]
TENSOR = "policy.megatron_cfg.tensor_model_parallel_size=2"
# Without shared memory NCCL uses sockets, as between nodes. Then it reports an error soon after a loss.
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
CASES: dict[str, tuple[list[str], int, dict[str, str]]] = {
    "replicas": ([*TWO], 1, {}),
    "replicas without the first": ([*TWO], 0, {}),
    "tensor parallel": ([*TWO, TENSOR], 1, {}),
    "replicas over sockets": ([*TWO], 1, SOCKETS),
    "tensor parallel over sockets": ([*TWO, TENSOR], 1, SOCKETS),
    "moved": ([*TWO, "policy.use_pinned_optimizer_offload=true"], 1, {}),
}
RUN = [*SMALL, "cluster.gpus_per_node=2", "algorithm.max_num_steps=5", "checkpoint.save_period=1"]


@pytest.fixture
def local_ray(request, monkeypatch) -> Iterator[None]:
    """Ray's processes have the environment of this one."""
    _, _, environment = CASES[request.node.callspec.params["case"]]
    for name, value in (environment | {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "PYTHONPATH": PYTHONPATH}).items():
        monkeypatch.setenv(name, value)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("case", CASES)
def test_the_step_after_a_lost_rank_is_the_one_without_the_loss(gpu_model, tmp_path, case):
    overrides, victim, _ = CASES[case]
    found = lose_a_rank(tmp_path, gpu_model, victim, overrides)
    sys.stdout.write(f"\n{case}: {describe(found)}\n")
    assert found.kept == [1 - victim]
    assert [rank for rank in range(2) if found.after[rank] == found.before[rank]] == found.kept
    log = (tmp_path / "logs" / f"policy-{1 - victim}.log").read_text()
    assert re.search(r"aborting \d+ NCCL communicators", log) and "was not aborted" not in log
    for name, one in found.undisturbed.items():
        torch.testing.assert_close(found.weights[name], one, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("layout", [[], [TENSOR]], ids=["replicas", "tensor parallel"])
def test_a_run_replaces_the_lost_rank_alone(gpu_model, tmp_path, layout):
    """Engines and the other rank keep their processes, and the run its steps."""
    folder = tmp_path / "run"
    assert lose_in_step_three(folder, gpu_model, layout) == 0
    workers = ["policy-0", "policy-1", *(log.stem for log in folder.glob("logs/generation-?.log"))]
    numbers: dict[str, Any] = {worker: len(processes(folder, worker)) for worker in workers}
    assert numbers == dict.fromkeys(workers, 1) | {"policy-1": 2}
    assert (folder / "hf" / "model.safetensors").is_file()


def lose_in_step_three(folder: Path, model: Path, layout: list[str]) -> int:
    """Run the command and kill rank 1 after step 2; exit status."""
    command, killed = run_command(folder, model, "logger.plots=false", *RUN, *layout), False
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": PYTHONPATH}
    ) as run:
        for line in run.stdout or ():
            if not killed and re.match(r"step +2/", line):
                os.kill(processes(folder, "policy-1")[-1], signal.SIGKILL)
                killed = True
        return run.wait(timeout=500)
