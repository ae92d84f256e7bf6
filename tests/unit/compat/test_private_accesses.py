"""Private names of libraries, and patches of them, are in `compat/` alone."""

import pytest
from house import private_accesses

from tests.unit.pages import ROOT

PACKAGE = ROOT / "nemo_rl_lite"


def test_there_are_none_outside_compat():
    files = [file for file in PACKAGE.rglob("*.py") if file.parent.name != "compat"]
    assert [f"{file.relative_to(ROOT)}:{one}" for file in files for one in private_accesses(file.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import ray\nray._private.worker",
        "from hydra._internal.utils import run",
        "from transformers.utils import _compile",
        "def f(self):\n    return self.engine._core",
        "import torch\ntorch.cuda.sync = None",
        "def f():\n    from te import attention\n    setattr(attention, 'reorder', 1)",
        "import sys\nsys.modules['wandb'] = None",
    ],
)
def test_what_is_found(source):
    assert len(list(private_accesses(source))) >= 1


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        return self._x",
        "from nemo_rl_lite.a import _b",
        "import os\nos._exit(1)\nos.environ['a'] = 'b'",
        "import sys\nsys.modules['__main__'] = module",
    ],
)
def test_what_is_not(source):
    assert list(private_accesses(source)) == []
