import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_lite.diagnosis.check import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Callable[..., Machine]:
    """Makes a machine whose /proc, /sys and /dev are in `tmp_path / "system"`. Keywords are its environment."""
    for name in os.environ.keys() & {"CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "RAY_ADDRESS", "RAY_TMPDIR", "CC"}:
        monkeypatch.delenv(name)

    def make(gpus=(), trouble: str = "", kind: str = "cpu", **environment: str) -> Machine:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "system").mkdir(exist_ok=True)
        return Machine(gpus, trouble, kind, tmp_path / "system")

    return make
