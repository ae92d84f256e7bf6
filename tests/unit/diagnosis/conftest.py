from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_lite.diagnosis.check import Machine
from nemo_rl_lite.diagnosis.smi import GpuAnswer


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    """A machine without GPUs, whose /proc, /sys and /dev are in `tmp_path / "system"`, but for what is given."""

    def make(gpus: GpuAnswer | None = None, kind: str = "cpu", **environment: str) -> Machine:
        system = tmp_path / "system"
        system.mkdir(exist_ok=True)
        return Machine(gpus or GpuAnswer(), environment, tmp_path, kind, system)

    return make
