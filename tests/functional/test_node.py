"""Two nodes of a Ray, each with its own processes, on one machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.functional.conftest import PYTHONPATH

pytestmark = pytest.mark.functional
# Joins the Ray that it is given, and says what there is. It ends when the one that was lost is there again.
LOOK = """
import os, time, ray
from pathlib import Path
from nemo_rl_lite.slurm.node import wait_for_nodes
from nemo_rl_lite.errors import LauncherError
try:
    wait_for_nodes(os.environ["RAY_ADDRESS"], 3, 1.0, Path("logs"))
except LauncherError as error:
    print(error, flush=True)
ray.init(log_to_driver=False)
def nodes():
    return [node["Alive"] for node in ray.nodes()]
print("nodes", sum(nodes()), "gpus", ray.cluster_resources()["GPU"], flush=True)
while not os.path.exists("go on"):
    time.sleep(0.2)
# The one that died is known to be dead, and another is there.
while sorted(nodes()) != [False, True, True]:
    time.sleep(0.2)
print("again 2", flush=True)
raise SystemExit(75)
"""


class Nodes:
    """The processes that srun would start."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, []

    def start(self, rank: int, count: int, *words: str) -> subprocess.Popen:
        slurm = {"SLURM_PROCID": rank, "SLURM_NTASKS": count, "SLURM_NNODES": count, "SLURM_GPUS_ON_NODE": 1}
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environ |= {name: str(value) for name, value in slurm.items()} | {"PYTHONPATH": PYTHONPATH}
        command = [sys.executable, "-m", "nemo_rl_lite.slurm.node", f"--meeting={self.folder}"]
        with (self.folder / f"{rank}.out").open("w") as output:
            process = subprocess.Popen(
                [*command, f"--logs={self.folder / 'logs'}", *words],
                env=environ,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def said(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text()

    def until(self, rank: int, text: str, limit_s: float = 600) -> None:
        deadline = time.monotonic() + limit_s
        while text not in self.said(rank):
            over = time.monotonic() > deadline or self.processes[rank].poll() is not None
            assert not over or text in self.said(rank), self.said(0) + self.said(rank)
            time.sleep(0.2)


@pytest.fixture
def nodes(tmp_path):
    nodes = Nodes(tmp_path)
    yield nodes
    for process in nodes.processes:
        process.kill()
        process.wait()


def raylets(process: subprocess.Popen) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children(recursive=True) if child.name() == "raylet"]


def test_nodes_meet_a_ray_that_dies_comes_back_and_nothing_is_left(nodes, tmp_path):
    first = nodes.start(0, 2, "--", sys.executable, "-c", LOOK)
    second = nodes.start(1, 2)
    nodes.until(0, "nodes 2 gpus 2.0")
    assert "2 of 3 nodes joined Ray within 1 s: " in nodes.said(0)
    assert (tmp_path / "attach.sh").stat().st_mode & 0o777 == 0o600
    # Slurm's, to every task: the nodes stay for as long as the first one's command does.
    second.send_signal(signal.SIGTERM)
    everyone = [child for node in (first, second) for child in psutil.Process(node.pid).children(recursive=True)]
    raylets(second)[0].kill()
    (tmp_path / "go on").touch()
    nodes.until(0, "again 2")
    assert first.wait(timeout=600) == 75 and second.wait(timeout=600) == 0
    assert (tmp_path / "status").read_text() == "75\n" and not (tmp_path / "attach.sh").exists()
    assert "its Ray ended" in nodes.said(1)
    _, left = psutil.wait_procs(everyone, timeout=120)
    assert not left


def test_without_a_first_node_the_others_say_so(nodes):
    second = nodes.start(1, 2, "--join-timeout-s=1")
    assert second.wait(timeout=600) == 1
    assert "the first node did not write its Ray's address within 1 s" in nodes.said(1)
